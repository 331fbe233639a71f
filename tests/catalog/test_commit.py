"""A step exists when its manifest does and never before, and only what is whole gets one."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.flushed import note_flushes
from support import (
    layout_of,
    make_generation,
    make_root,
    put_part,
    put_parts,
    read_save,
    replace_object,
    resealed,
    state,
)

from ckptlib.catalog import commit
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.finishing import finish_saves
from ckptlib.errors import (
    CorruptData,
    FormatError,
    ObjectNotFound,
    ReplicasDiffer,
    SaveFailed,
    StoreError,
    StoreFull,
    Superseded,
)
from ckptlib.format.check import Check, check_of, compared
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.manifest import Generation, TrashRecord
from ckptlib.format.part import FailedPart, Part
from ckptlib.stores import Store
from ckptlib.stores.local import LocalStore


def seconds(left: float) -> Callable[[], float]:
    end = time.monotonic() + left
    return lambda: end - time.monotonic()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_exists_when_it_is_committed_and_not_before(catalog: Catalog, world_size: int) -> None:
    generation = make_generation(catalog)
    save, names = put_parts(catalog, generation, 10, state(10), world_size)
    assert (catalog.saves(), catalog.is_committed(save)) == ([], False)
    manifest = Committer(catalog).commit(save, names)
    assert (catalog.saves(), catalog.is_committed(save)) == ([save], True)
    assert Catalog(catalog.store).manifest(save) == manifest
    assert manifest.parts == tuple(names)
    for name, expected in state(10).items():
        assert np.array_equal(read_save(catalog.store, save)[name], expected)


def test_the_names_of_parts_are_durable_before_the_manifest_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part is listed as soon as it is linked, and the put that linked it may still wait for its directory."""
    catalog = make_root(LocalStore(str(tmp_path)))
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    calls, fsync, link = list[str](), os.fsync, os.link

    def noted_fsync(fd: int) -> None:
        fsync(fd)
        calls.append(f"flushed {os.readlink(f'/proc/self/fd/{fd}')}")

    def noted_link(source: str, target: str, **given: Any) -> None:
        calls.append(f"linked {target}")
        link(source, target, **given)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", noted_link)
    Committer(catalog).commit(save, names)
    assert f"flushed {tmp_path}/parts/{save}" in calls[: calls.index(f"linked {save}.json")]


def commit_once_more(catalog: Catalog, save: SaveId, names: Sequence[PartName]) -> None:
    Committer(catalog).commit(save, names)


def find_it(catalog: Catalog, save: SaveId, names: Sequence[PartName]) -> None:
    Committer(catalog).commit_when_whole(save, len(names), seconds(60))


@pytest.mark.parametrize("how", [commit_once_more, find_it])
def test_a_manifest_that_another_one_has_put_is_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Callable[[Catalog, SaveId, Sequence[PartName]], None]
) -> None:
    """That one may have died as soon as the name was there."""
    catalog = make_root(LocalStore(str(tmp_path)))
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    Committer(catalog).commit(save, names)
    flushed = note_flushes(monkeypatch)
    how(Catalog(catalog.store), save, names)
    assert f"{tmp_path}/steps" in flushed


@pytest.mark.parametrize(
    ("full", "by", "is_there"), [("/.tmp/", "own", False), ("/steps", "own", True), ("/steps", "other", True)]
)
def test_a_manifest_may_be_there_where_its_directory_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, by: str, is_there: bool
) -> None:
    """A full disk that refuses the file itself has nothing."""
    catalog, fsync = make_root(LocalStore(str(tmp_path))), os.fsync
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10))
    if by == "other":
        Committer(catalog).commit(save, names)

    def refuse(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{tmp_path}{full}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    committer = Committer(Catalog(catalog.store))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", refuse)
        with pytest.raises(StoreFull, match="No space left"):
            committer.commit(save, names)
    assert (catalog.is_committed(save), committer.may_have_put(save)) == (is_there, is_there)


@pytest.mark.parametrize("where", ["parts", "steps"])
def test_a_step_that_another_one_has_told_of_stays_whole_where_a_name_in_it_cannot_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As where a server fails one host alone. `where`: who puts a part fails, and another one has committed the step
    by then; or a second committer has told that it is saved."""
    catalog, fsync = make_root(LocalStore(str(tmp_path))), os.fsync
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)

    def told_by_another(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{tmp_path}/{where}"):
            monkeypatch.setattr(os, "fsync", fsync)
            find_it(Catalog(catalog.store), save, names)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    committer, last = Committer(catalog), names[-1].key
    action: Callable[[], object] = partial(committer.commit, save, names)
    if where == "parts":
        action = partial(catalog.store.put, last, catalog.store.get(last))
        catalog.store.delete(last)
    monkeypatch.setattr(os, "fsync", told_by_another)
    with pytest.raises(StoreError, match=r"cannot flush: .*\(errno 5\)\. The object is there, but"):
        action()
    assert catalog.saves() == [save]
    assert sorted(read_save(catalog.store, save)) == sorted(state(10))
    assert committer.commit_when_whole(save, 2, seconds(60)).save == save


@pytest.mark.parametrize("newest_first", [True, False])
def test_of_two_whole_snapshots_of_one_step_the_newest_counts(newest_first: bool) -> None:
    """One that lacks a rank does not, however new; and both orders of names come, as attempts are drawn."""
    save = SaveId(10, GenerationId(1, "00000001"))
    whole, half = {7: "1" * 8, 8: "2" * 8}, (9, "3" * 8)
    names = {
        rank: [PartName(save, rank, attempt, "0" * 32, "0" * 32, compared(number)) for number, attempt in whole.items()]
        for rank in (0, 1)
    }
    names[0].append(PartName(save, 0, half[1], "0" * 32, "0" * 32, compared(half[0])))
    found = {rank: some[::-1] if newest_first else some for rank, some in names.items()}
    chosen, missing = commit.choose_parts(found, 2)
    assert ([name.attempt for name in chosen], missing) == ([whole[8]] * 2, [])


def test_the_size_of_a_step_is_known_where_the_names_of_parts_do_not_tell_it(store: Store, catalog: Catalog) -> None:
    """As those do not that an earlier version has put."""
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    size = Committer(catalog).prover.manifest_of(save, names).nbytes
    early = [replace(name, uses=None, nbytes=None) for name in names]
    for name, renamed in zip(names, early, strict=True):
        store.put(renamed.key, store.get(name.key))
    for found in (early, [names[0], early[1]]):
        assert Committer(Catalog(store)).prover.manifest_of(save, found).nbytes == size > 0


def test_whoever_commits_puts_the_same(store: Store, catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    Committer(catalog).commit(save, names)
    first = store.get(save.manifest_key)
    assert Committer(Catalog(store)).commit(save, names).encode() == first
    store.delete(save.manifest_key)
    Committer(Catalog(store)).commit(save, names)
    assert store.get(save.manifest_key) == first


def refused(catalog: Catalog, save: SaveId, commit: Callable[[], object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        commit()
    assert not catalog.is_committed(save)


def test_commit_refuses_holes(catalog: Catalog) -> None:
    save, layout = SaveId(10, make_generation(catalog)), layout_of(state(10), 2)
    less = {name: array for name, array in state(10).items() if name != "w"}
    names = [
        put_part(catalog, save, 0, layout, state(10)),
        put_part(catalog, save, 1, layout_of(less, 2), less),
    ]
    refused(catalog, save, lambda: Committer(catalog).commit(save, names), SaveFailed, r"no rank wrote w\[3:6, 0:4\]")


def test_commit_proves_again_when_a_table_changes(catalog: Catalog) -> None:
    generation = make_generation(catalog)
    committer = Committer(catalog)
    committer.commit(*put_parts(catalog, generation, 10, state(10), 2))
    save, layout = SaveId(20, generation), layout_of(state(20), 2)
    less = {name: array for name, array in state(20).items() if name != "w"}
    names = [put_part(catalog, save, 0, layout, state(20)), put_part(catalog, save, 1, layout_of(less, 2), less)]
    refused(catalog, save, lambda: committer.commit(save, names), SaveFailed, "no rank wrote w")


def test_commit_refuses_a_superseded_generation(catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog, 1), 10, state(10))
    make_generation(catalog, 2)
    refused(catalog, save, lambda: Committer(catalog).commit(save, names), Superseded, "may no longer save")


def test_what_a_generation_left_that_another_one_has_outrun_is_not_restored(catalog: Catalog) -> None:
    """The record of one came late, as from a host without its network: the next job, on other hosts, took the same
    number, and has saved steps since. They are not left behind, whichever has the higher nonce."""
    late, other = (Generation(GenerationId(1, nonce * 8), 1, None, 0.0, {}, "here") for nonce in "f1")
    left = SaveId(5, late.id)
    for record in (late, other):
        catalog.generations.put(record)
    assert catalog.visible([left]) == [left], "neither has saved yet"
    saved = [SaveId(step, other.id) for step in (10, 20)]
    assert catalog.visible([left], saves=saved) == saved
    assert catalog.visible([left], saves=[*saved, SaveId(4, late.id)])[-1] == left, "of the head"


def test_commit_refuses_failed_and_damaged_parts(store: Store, catalog: Catalog) -> None:
    save, [name] = put_parts(catalog, make_generation(catalog), 10, state(10))
    failed, document = FailedPart(save, 0, "f" * 8, "no space").encode()
    store.put(failed.key, document)
    refused(
        catalog, save, lambda: Committer(catalog).commit(save, [failed]), FormatError, "is a failure, expected a part"
    )
    good = store.get(name.key)
    for data in (good[:-1], good[:99], resealed(good, rank=1), good.replace(b'"rank":0', b'"rank":1')):
        replace_object(store, name.key, data)
        refused(
            catalog, save, lambda: Committer(Catalog(store)).commit(save, [name]), CorruptData, "digest in its name"
        )
    store.delete(name.key)
    refused(catalog, save, lambda: Committer(Catalog(store)).commit(save, [name]), ObjectNotFound, "no such object")


def test_commit_refuses_a_part_that_contradicts_its_layout(store: Store, catalog: Catalog) -> None:
    save, [name] = put_parts(catalog, make_generation(catalog), 10, state(10))
    part = Part.decode(name, store.get(name.key))
    torn = replace(part, attempt="f" * 8, table=replace(part.table, tensors=(99, *part.table.tensors[1:])))
    other, document = torn.encode()
    store.put(other.key, document)
    refused(catalog, save, lambda: Committer(catalog).commit(save, [other]), FormatError, "a shard names tensor 99")


def test_commit_refuses_parts_for_another_number_of_ranks(catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    refused(catalog, save, lambda: Committer(catalog).commit(save, names[:1]), SaveFailed, "for 2 ranks, expected 1")


def test_commit_takes_one_part_of_every_rank_in_order(catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    for wrong in (names[::-1], [names[0], names[0]], names[1:]):
        refused(
            catalog,
            save,
            lambda wrong=wrong: Committer(catalog).commit(save, wrong),
            AssertionError,
            "one part per rank",
        )  # type: ignore[misc]


def test_commit_when_whole_names_who_did_not_come(catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 3)
    catalog.store.delete(names[1].key)
    refused(
        catalog,
        save,
        lambda: Committer(catalog).commit_when_whole(save, 3, seconds(0.05)),
        SaveFailed,
        "no part came from 1 of 3 ranks: 1",
    )


def test_commit_when_whole_says_why_a_rank_failed_and_takes_its_second_attempt(catalog: Catalog) -> None:
    save, layout = SaveId(10, make_generation(catalog)), layout_of(state(10), 2)
    put_part(catalog, save, 0, layout, state(10))
    failed, document = FailedPart(save, 1, "f" * 8, "no space on /scratch").encode()
    catalog.store.put(failed.key, document)
    refused(
        catalog,
        save,
        lambda: Committer(catalog).commit_when_whole(save, 2, seconds(60)),
        SaveFailed,
        "rank 1 failed: no space on /scratch",
    )
    put_part(catalog, save, 1, layout, state(10))
    assert Committer(catalog).commit_when_whole(save, 2, seconds(60)).world_size == 2


def test_a_committer_that_waits_says_for_whom(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A host may vanish without a word; rank 0 waits for as long as a save may take, and nobody knew for whom."""
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 3)
    catalog.store.delete(names[2].key)
    monkeypatch.setattr(commit, "TELL_AFTER_S", 0.0)
    left = iter([60.0] * 10)
    with pytest.raises(SaveFailed, match="no part came from 1 of 3 ranks: 2"):
        Committer(catalog).commit_when_whole(save, 3, lambda: next(left, 0.0))
    assert [record.getMessage() for record in caplog.records] == [
        "step 10 still waits for the parts of 1 of 3 ranks: 2; it is given up in 60 s"
    ]


def test_what_rank_0_has_given_up_is_not_committed_by_its_next_writer(catalog: Catalog) -> None:
    """All parts are there: the word came behind them, and other ranks act upon it. Of a save that nobody has committed
    before, it came before the parts: an import goes on where it failed."""
    save, layout = SaveId(10, make_generation(catalog)), layout_of(state(10), 2)
    for rank in range(2):
        put_part(catalog, save, rank, layout, state(10))
    failed, document = FailedPart(save, 0, "f" * 8, "the store was away").encode()
    catalog.store.put(failed.key, document)
    committer = Committer(catalog)
    committer.doubt(save)
    call = lambda: committer.commit_when_whole(save, 2, seconds(60))  # noqa: E731
    refused(catalog, save, call, SaveFailed, "rank 0 failed: the store was away")
    assert Committer(catalog).commit_when_whole(save, 2, seconds(60)).world_size == 2


@pytest.mark.parametrize(
    ("left", "in_doubt"),
    [("its part", False), ("its part, and a trash record", True), ("nothing", True)],
)
def test_what_a_dead_committer_had_may_be_there_where_a_sweep_may_have_taken_the_rest(
    catalog: Catalog, left: str, in_doubt: bool
) -> None:
    """Nobody commits what lacks a part, unless the part went later: then it is no proof."""
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    catalog.store.delete(*(name.key for name in names[left != "nothing" :]))
    if "record" in left:
        catalog.store.put(save.trash_key, TrashRecord(save, "never committed").encode())
    committer = Committer(catalog)
    committer.doubt(save)
    with pytest.raises(SaveFailed, match="no part came from"):
        committer.commit_when_whole(save, 2, seconds(0.05))
    assert committer.may_have_put(save) == in_doubt


def test_commit_when_whole_gives_up_when_superseded(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "HEAD_EVERY_S", 0.1)
    save, names = put_parts(catalog, make_generation(catalog, 1), 10, state(10), 2)
    catalog.store.delete(names[1].key)
    make_generation(catalog, 2)
    refused(
        catalog, save, lambda: Committer(catalog).commit_when_whole(save, 2, seconds(60)), Superseded, "may no longer"
    )


# -- checks


def put_checked(catalog: Catalog, save: SaveId, checks: list[Check | None], attempt: str = "0" * 8) -> list[PartName]:
    layout = layout_of(state(save.step), len(checks))
    return [
        put_part(catalog, save, rank, layout, state(save.step), attempt, check=check)
        for rank, check in enumerate(checks)
    ]


def digests(rank: int, digest: bytes, number: int = 7) -> Check:
    return check_of(number, rank, {(0, 1): digest})


def test_parts_whose_checks_agree_are_committed(catalog: Catalog) -> None:
    save = SaveId(10, make_generation(catalog, 1))
    names = put_checked(catalog, save, [digests(0, b"same"), digests(1, b"same")])
    assert catalog.part(names[1]).check == names[1].check
    Committer(catalog).commit(save, names)
    assert np.array_equal(read_save(catalog.store, save)["w"], state(10)["w"])


@pytest.mark.parametrize("known", [False, True])
def test_replicas_that_differ_are_never_committed(catalog: Catalog, known: bool) -> None:
    """Also where the tables are those of a step that was proved."""
    generation, committer = make_generation(catalog, 1), Committer(catalog)
    if known:
        earlier = SaveId(5, generation)
        committer.commit(earlier, put_checked(catalog, earlier, [digests(0, b"same"), digests(1, b"same")]))
    save = SaveId(10, generation)
    names = put_checked(catalog, save, [digests(0, b"one"), digests(1, b"two")])
    refused(catalog, save, lambda: committer.commit(save, names), ReplicasDiffer, "step 10: what several ranks hold")
    assert save not in finish_saves(Catalog(catalog.store), catalog.next_generation())
    assert save not in catalog.saves()


@pytest.mark.parametrize("other", [None, compared(8), digests(1, b"same", number=8)], ids=str)
def test_parts_of_two_snapshots_of_one_step_are_no_step(catalog: Catalog, other: Check | None) -> None:
    save = SaveId(10, make_generation(catalog, 1))
    put_checked(catalog, save, [compared(7), other])
    call = lambda: Committer(catalog).commit_when_whole(save, 2, seconds(0))  # noqa: E731
    refused(catalog, save, call, SaveFailed, "no part came from 1 of 2 ranks")
    assert finish_saves(catalog, catalog.next_generation()) == []


def test_of_two_snapshots_of_one_step_the_one_that_is_whole_is_committed(catalog: Catalog) -> None:
    save = SaveId(10, make_generation(catalog, 1))
    whole = put_checked(catalog, save, [compared(7), compared(7)])
    put_part(catalog, save, 1, layout_of(state(99), 2), state(99), "1" * 8, check=compared(8))
    assert Committer(catalog).commit_when_whole(save, 2, seconds(0)).parts == tuple(whole)
    assert np.array_equal(read_save(catalog.store, save)["w"], state(10)["w"])


def test_a_name_that_tells_of_another_check_is_another_part(catalog: Catalog) -> None:
    save = SaveId(10, make_generation(catalog, 1))
    names = put_checked(catalog, save, [compared(7), digests(1, b"other")])
    renamed = replace(names[1], check=compared(7))
    catalog.store.put(renamed.key, catalog.store.get(names[1].key))
    with pytest.raises(FormatError, match="content and name tell of different parts"):
        catalog.part(renamed)
