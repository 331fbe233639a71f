"""What a root holds, and that a step exists when its manifest does and never before."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    flips,
    layout_of,
    make_generation,
    make_root,
    make_save,
    put_part,
    put_parts,
    read_save,
    resealed,
    state,
)

from ckptlib.catalog.catalog import Catalog, history
from ckptlib.errors import (
    CheckpointNotFound,
    CorruptData,
    FormatError,
    ObjectNotFound,
    ReplicasDiffer,
    SaveFailed,
    StoreError,
    Superseded,
    describe,
)
from ckptlib.format import keys
from ckptlib.format.check import Check, check_of, compared
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.manifest import Generation, Root
from ckptlib.format.part import FailedPart, Part
from ckptlib.stores import Store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import FaultStore


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalStore(str(tmp_path / "root")) if request.param == "local" else MemoryStore()


@pytest.fixture
def catalog(store: Store) -> Catalog:
    return make_root(store)


def replace_object(store: Store, key: str, data: bytes) -> None:
    store.delete(key)
    store.put(key, data)


def seconds(left: float) -> Callable[[], float]:
    end = time.monotonic() + left
    return lambda: end - time.monotonic()


# -- history


def generation_id(number: int) -> GenerationId:
    return GenerationId(number, f"{number:08x}")


def told(*story: tuple[int, tuple[int, int] | None, list[int]]) -> list[tuple[int, int]]:
    """(generation, step) of what is visible after (generation, (generation, step) resumed from, steps committed)."""
    records, saves = {}, []
    for number, origin, steps in story:
        resumed = None if origin is None else SaveId(origin[1], generation_id(origin[0]))
        records[generation_id(number)] = Generation(generation_id(number), 1, resumed, 0.0, {}, "here")
        saves += [SaveId(step, generation_id(number)) for step in steps]
    return [(save.generation.number, save.step) for save in history(reversed(saves), records)]


def test_history_of_one_generation() -> None:
    assert told() == []
    assert told((1, None, [])) == []
    assert told((1, None, [10, 30, 20])) == [(1, 10), (1, 20), (1, 30)]


def test_history_goes_on_where_a_generation_resumed() -> None:
    assert told((1, None, [10, 20]), (2, (1, 20), [30])) == [(1, 10), (1, 20), (2, 30)]


def test_history_forgets_what_lies_behind_a_rewind() -> None:
    assert told((1, None, [10, 20, 30]), (2, (1, 10), [15, 20])) == [(1, 10), (2, 15), (2, 20)]
    assert told((1, None, [10, 20, 30]), (2, (1, 20), [25, 30]), (3, (1, 10), [11])) == [(1, 10), (3, 11)]
    # a limit holds for all that came before, also through a generation that went further
    assert told((1, None, [10, 20]), (2, (1, 20), [30]), (3, (2, 15), [16])) == [(1, 10), (3, 16)]


def test_a_generation_that_never_committed_is_no_part_of_history() -> None:
    assert told((1, None, [10, 20]), (2, (1, 10), [])) == [(1, 10), (1, 20)]
    # but one that was resumed from in memory hands on what it came from
    assert told((1, None, [10, 20]), (2, (1, 20), []), (3, (2, 25), [30])) == [(1, 10), (1, 20), (3, 30)]


def test_a_new_beginning_hides_all_that_was() -> None:
    assert told((1, None, [10, 20]), (2, None, [5])) == [(2, 5)]


def test_records_that_run_in_a_circle_or_into_nothing_end() -> None:
    assert told((1, (2, 50), [10]), (2, (1, 50), [20])) == [(1, 10), (2, 20)]
    assert told((1, (1, 50), [10])) == [(1, 10)]
    assert told((2, (1, 5), [10])) == [(2, 10)]
    saves = [SaveId(step, generation_id(9)) for step in (1, 2)]
    assert history(saves, {}) == saves


@given(
    st.lists(
        st.tuples(
            st.none() | st.tuples(st.integers(1, 6), st.integers(0, 20)),
            st.lists(st.integers(0, 20), max_size=4, unique=True),
        ),
        max_size=6,
    )
)
def test_any_history_ends_and_shows_the_newest_generation(story: list[tuple[object, list[int]]]) -> None:
    found = told(*((i + 1, origin, steps) for i, (origin, steps) in enumerate(story)))  # type: ignore[arg-type, misc]
    committed = [(i + 1, step) for i, (_, steps) in enumerate(story) for step in steps]
    assert len(set(found)) == len(found)
    assert set(found) <= set(committed)
    if committed:
        head = max(committed)[0]
        assert {save for save in committed if save[0] == head} <= set(found)


# -- reading


def test_an_empty_store_is_no_root(store: Store) -> None:
    catalog = Catalog(store)
    with pytest.raises(CheckpointNotFound, match=r"no ckptlib\.json"):
        catalog.root()
    assert (catalog.saves(), catalog.visible(), catalog.generations()) == ([], [], {})
    with pytest.raises(CheckpointNotFound, match="no committed step"):
        catalog.resolve("latest")


def test_the_first_root_stands(store: Store) -> None:
    first, second = Root("1" * 32, "xxh3", 60.0), Root("2" * 32, "blake3", 90.0)
    assert Catalog(store).open_root(first) == first
    assert Catalog(store).open_root(second) == first


def test_an_outage_is_not_an_empty_root(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('[{"op": "scan", "action": "error"}, {"op": "get", "action": "error"}]')
    catalog = Catalog(FaultStore(MemoryStore(), str(plan)))
    for ask in (
        catalog.root,
        catalog.saves,
        catalog.visible,
        catalog.next_generation,
        lambda: catalog.resolve("latest"),
    ):
        with pytest.raises(StoreError) as caught:
            ask()
        assert not isinstance(caught.value, ObjectNotFound)


def test_resolve_says_which_steps_there_are(catalog: Catalog) -> None:
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in (10, 20)]
    second = make_generation(catalog, 2, resumed_from=saves[0])
    newest = make_save(catalog, second, 15, state(15))
    assert catalog.resolve("latest") == newest
    assert catalog.resolve(10) == catalog.resolve("10") == saves[0]
    assert catalog.resolve(str(saves[1])) == saves[1], "left behind, but there by its name"
    with pytest.raises(CheckpointNotFound, match="no step 20; the last ones are: 10, 15"):
        catalog.resolve(20)
    with pytest.raises(CheckpointNotFound, match="no save"):
        catalog.resolve(str(SaveId(99, first)))
    with pytest.raises(CheckpointNotFound, match="neither a step's number"):
        catalog.resolve("../x")
    with pytest.raises(CheckpointNotFound):
        catalog.manifest(SaveId(99, first))


def test_strangers_in_the_root_are_not_listed(store: Store, catalog: Catalog) -> None:
    save = make_save(catalog, make_generation(catalog), 10, state(10))
    for key in ("steps/notes.txt", "steps/10.json", f"steps/{save}.json.bak", "generations/x.json", "parts/a/b.json"):
        store.put(key, b"?")
    assert catalog.saves() == [save]
    assert len(catalog.generation_ids()) == 1
    assert catalog.finish(GenerationId(9, "0" * 8)) == []


def test_info(catalog: Catalog) -> None:
    save = make_save(catalog, make_generation(catalog), 10, state(10), world_size=2)
    info = catalog.info(save, visible=True)
    assert (info.step, info.generation, info.world_size, info.name, info.visible) == (10, 1, 2, str(save), True)
    assert info.nbytes == sum(entry.nbytes for entry in catalog.store.scan(keys.PACKS))


def test_a_layout_that_is_not_what_its_name_says_is_refused(store: Store, catalog: Catalog) -> None:
    layout = layout_of(state(1))
    catalog.put_layout(layout.digest, layout.encoded)
    catalog.put_layout(layout.digest, layout.encoded)
    assert Catalog(store).layout(layout.digest) == layout
    for _, data in list(flips(layout.encoded))[::97]:
        replace_object(store, keys.layout_key(layout.digest), data)
        with pytest.raises(CorruptData, match="does not match the digest in its name"):
            Catalog(store).layout(layout.digest)
    store.delete(keys.layout_key(layout.digest))
    with pytest.raises(ObjectNotFound):
        Catalog(store).layout(layout.digest)


def test_a_damaged_generation_hides_no_steps_but_says_so(
    store: Store, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    generation = make_generation(catalog)
    save = make_save(catalog, generation, 10, state(10))
    replace_object(store, generation.key, store.get(generation.key)[:-5])
    assert Catalog(store).visible() == [save]
    assert str(generation) in caplog.text
    with pytest.raises(CorruptData, match=str(generation)):
        Catalog(store).generations()


def test_a_damaged_layout_is_put_again(store: Store, catalog: Catalog) -> None:
    """It is shared by every step that has it, so a save that has it at hand mends them all."""
    save = make_save(catalog, make_generation(catalog), 10, state(10))
    digest, layout = next((d, catalog.layout(d)) for d in catalog.manifest(save).layouts)
    key = keys.layout_key(digest)
    replace_object(store, key, store.get(key)[:-5])
    with pytest.raises(CorruptData):
        Catalog(store).layout(digest)
    catalog.put_layout(digest, layout.encoded)
    assert Catalog(store).layout(digest) == layout


def test_a_layout_that_cannot_be_read_is_put_again(store: Store, catalog: Catalog, tmp_path: Path) -> None:
    save = make_save(catalog, make_generation(catalog), 10, state(10))
    digest, layout = next((d, catalog.layout(d)) for d in catalog.manifest(save).layouts)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"op": "get", "key": "^layouts/", "action": "unreadable"}]))
    faulty = FaultStore(store, str(plan))
    Catalog(faulty).put_layout(digest, layout.encoded)
    log = [json.loads(line) for line in (tmp_path / "plan.json.log").read_text().splitlines()]
    assert [line["op"] for line in log] == ["get", "delete", "put"]
    assert Catalog(store).layout(digest) == layout
    plan.write_text(json.dumps([{"op": "get", "key": "^layouts/", "action": "error"}]))
    with pytest.raises(StoreError, match="as planned"):  # that is the store's own trouble
        Catalog(faulty).put_layout(digest, layout.encoded)
    assert Catalog(store).layout(digest) == layout


def test_a_record_that_is_lost_or_cannot_be_read_ends_history_and_says_so(
    store: Store, catalog: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_generation(catalog, 1)
    old = make_save(catalog, first, 10, state(10))
    second = make_generation(catalog, 2, resumed_from=old)
    new = make_save(catalog, second, 20, state(20))
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"op": "get", "key": str(second), "action": "unreadable"}]))
    assert Catalog(FaultStore(store, str(plan))).visible() == [new]
    assert f"what generation {second} resumed from is not known" in caplog.text
    caplog.clear()
    replace_object(store, second.key, store.get(first.key))
    assert Catalog(store).visible() == [new]
    assert "content and name tell of different generations" in caplog.text
    caplog.clear()
    store.delete(second.key)
    assert Catalog(store).visible() == [new]
    assert f"{second.key}: no such object" in caplog.text


def test_what_somebody_gave_up_is_never_finished(store: Store, catalog: Catalog) -> None:
    """Though all parts are there: it was reported as failed."""
    generation = make_generation(catalog)
    save, _ = put_parts(catalog, generation, 10, state(10))
    name, document = FailedPart(save, 0, "f" * 8, "the deadline passed").encode()
    store.put(name.key, document)
    assert catalog.finish(GenerationId(2, "0" * 8)) == []
    assert catalog.saves() == []


# -- generations


def test_generations_count_up_also_where_only_their_steps_are_left(store: Store, catalog: Catalog) -> None:
    assert catalog.next_generation().number == 1
    generation = make_generation(catalog, 7)
    assert catalog.next_generation().number == 8
    make_save(catalog, generation, 1, state(1))
    store.delete(generation.key)
    assert Catalog(store).next_generation().number == 8


def test_a_newer_generation_supersedes(catalog: Catalog) -> None:
    old = make_generation(catalog, 1)
    catalog.check_head(old)
    new = make_generation(catalog, 2)
    catalog.check_head(new)
    with pytest.raises(Superseded, match="Two jobs use one root"):
        catalog.check_head(old)


# -- commit


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_exists_when_it_is_committed_and_not_before(catalog: Catalog, world_size: int) -> None:
    generation = make_generation(catalog)
    save, names = put_parts(catalog, generation, 10, state(10), world_size)
    assert (catalog.saves(), catalog.is_committed(save)) == ([], False)
    manifest = catalog.commit(save, names)
    assert (catalog.saves(), catalog.is_committed(save)) == ([save], True)
    assert Catalog(catalog.store).manifest(save) == manifest
    assert manifest.parts == tuple(names)
    for name, expected in state(10).items():
        assert np.array_equal(read_save(catalog.store, save)[name], expected)


def test_whoever_commits_puts_the_same(store: Store, catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    catalog.commit(save, names)
    first = store.get(save.manifest_key)
    assert Catalog(store).commit(save, names).encode() == first
    store.delete(save.manifest_key)
    Catalog(store).commit(save, names)
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
    refused(catalog, save, lambda: catalog.commit(save, names), SaveFailed, r"no rank wrote w\[3:6, 0:4\]")


def test_commit_proves_again_when_a_table_changes(catalog: Catalog) -> None:
    generation = make_generation(catalog)
    make_save(catalog, generation, 10, state(10), 2)
    save, layout = SaveId(20, generation), layout_of(state(20), 2)
    less = {name: array for name, array in state(20).items() if name != "w"}
    names = [put_part(catalog, save, 0, layout, state(20)), put_part(catalog, save, 1, layout_of(less, 2), less)]
    refused(catalog, save, lambda: catalog.commit(save, names), SaveFailed, "no rank wrote w")


def test_commit_refuses_a_superseded_generation(catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog, 1), 10, state(10))
    make_generation(catalog, 2)
    refused(catalog, save, lambda: catalog.commit(save, names), Superseded, "may no longer save")


def test_commit_refuses_failed_and_damaged_parts(store: Store, catalog: Catalog) -> None:
    save, [name] = put_parts(catalog, make_generation(catalog), 10, state(10))
    failed, document = FailedPart(save, 0, "f" * 8, "no space").encode()
    store.put(failed.key, document)
    refused(catalog, save, lambda: catalog.commit(save, [failed]), FormatError, "is a failure, expected a part")
    good = store.get(name.key)
    for data in (good[:-1], good[:99], resealed(good, rank=1), good.replace(b'"rank":0', b'"rank":1')):
        replace_object(store, name.key, data)
        refused(catalog, save, lambda: Catalog(store).commit(save, [name]), CorruptData, "digest in its name")
    store.delete(name.key)
    refused(catalog, save, lambda: Catalog(store).commit(save, [name]), ObjectNotFound, "no such object")


def test_commit_refuses_a_part_that_contradicts_its_layout(store: Store, catalog: Catalog) -> None:
    save, [name] = put_parts(catalog, make_generation(catalog), 10, state(10))
    part = Part.decode(name, store.get(name.key))
    torn = replace(part, attempt="f" * 8, table=replace(part.table, tensors=(99, *part.table.tensors[1:])))
    other, document = torn.encode()
    store.put(other.key, document)
    refused(catalog, save, lambda: catalog.commit(save, [other]), FormatError, "a shard names tensor 99")


def test_commit_refuses_parts_for_another_number_of_ranks(catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    refused(catalog, save, lambda: catalog.commit(save, names[:1]), SaveFailed, "for 2 ranks, expected 1")


def test_commit_takes_one_part_of_every_rank_in_order(catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 2)
    for wrong in (names[::-1], [names[0], names[0]], names[1:]):
        refused(catalog, save, lambda wrong=wrong: catalog.commit(save, wrong), AssertionError, "one part per rank")  # type: ignore[misc]


def test_commit_when_whole_names_who_did_not_come(catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10), 3)
    catalog.store.delete(names[1].key)
    refused(
        catalog,
        save,
        lambda: catalog.commit_when_whole(save, 3, seconds(0.05)),
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
        lambda: catalog.commit_when_whole(save, 2, seconds(60)),
        SaveFailed,
        "rank 1 failed: no space on /scratch",
    )
    put_part(catalog, save, 1, layout, state(10))
    assert catalog.commit_when_whole(save, 2, seconds(60)).world_size == 2


def test_commit_when_whole_gives_up_when_superseded(catalog: Catalog) -> None:
    save, names = put_parts(catalog, make_generation(catalog, 1), 10, state(10), 2)
    catalog.store.delete(names[1].key)
    make_generation(catalog, 2)
    refused(catalog, save, lambda: catalog.commit_when_whole(save, 2, seconds(60)), Superseded, "may no longer")


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
    catalog.commit(save, names)
    assert np.array_equal(read_save(catalog.store, save)["w"], state(10)["w"])


@pytest.mark.parametrize("known", [False, True])
def test_replicas_that_differ_are_never_committed(catalog: Catalog, known: bool) -> None:
    """Also where the tables are those of a step that was proved."""
    generation = make_generation(catalog, 1)
    if known:
        earlier = SaveId(5, generation)
        catalog.commit(earlier, put_checked(catalog, earlier, [digests(0, b"same"), digests(1, b"same")]))
    save = SaveId(10, generation)
    names = put_checked(catalog, save, [digests(0, b"one"), digests(1, b"two")])
    refused(catalog, save, lambda: catalog.commit(save, names), ReplicasDiffer, "step 10: what several ranks hold")
    assert save not in Catalog(catalog.store).finish(catalog.next_generation())
    assert save not in catalog.saves()


@pytest.mark.parametrize("other", [None, compared(8), digests(1, b"same", number=8)], ids=str)
def test_parts_of_two_snapshots_of_one_step_are_no_step(catalog: Catalog, other: Check | None) -> None:
    save = SaveId(10, make_generation(catalog, 1))
    put_checked(catalog, save, [compared(7), other])
    call = lambda: catalog.commit_when_whole(save, 2, seconds(0))  # noqa: E731
    refused(catalog, save, call, SaveFailed, "no part came from 1 of 2 ranks")
    assert catalog.finish(catalog.next_generation()) == []


def test_of_two_snapshots_of_one_step_the_one_that_is_whole_is_committed(catalog: Catalog) -> None:
    save = SaveId(10, make_generation(catalog, 1))
    whole = put_checked(catalog, save, [compared(7), compared(7)])
    put_part(catalog, save, 1, layout_of(state(99), 2), state(99), "1" * 8, check=compared(8))
    assert catalog.commit_when_whole(save, 2, seconds(0)).parts == tuple(whole)
    assert np.array_equal(read_save(catalog.store, save)["w"], state(10)["w"])


def test_a_name_that_tells_of_another_check_is_another_part(catalog: Catalog) -> None:
    save = SaveId(10, make_generation(catalog, 1))
    names = put_checked(catalog, save, [compared(7), digests(1, b"other")])
    renamed = replace(names[1], check=compared(7))
    catalog.store.put(renamed.key, catalog.store.get(names[1].key))
    with pytest.raises(FormatError, match="content and name tell of different parts"):
        catalog.part(renamed)


# -- finish


def test_finish_commits_what_a_dead_generation_had_persisted_whole_and_nothing_else(
    store: Store, catalog: Catalog
) -> None:
    dead = make_generation(catalog, 1)
    before = make_save(catalog, dead, 10, state(10), 2)
    whole, _ = put_parts(catalog, dead, 20, state(20), 2)
    _, torn = put_parts(catalog, dead, 30, state(30), 2)
    store.delete(torn[1].key)
    _, headless = put_parts(catalog, dead, 40, state(40), 2)
    store.delete(headless[0].key)
    for damaged_rank in range(2):
        _, damaged = put_parts(catalog, dead, 50 + damaged_rank, state(50 + damaged_rank), 2)
        replace_object(store, damaged[damaged_rank].key, store.get(damaged[damaged_rank].key)[:-1])
    failed, document = FailedPart(SaveId(60, dead), 1, "f" * 8, "no space").encode()
    put_part(catalog, failed.save, 0, layout_of(state(60), 2), state(60))
    store.put(failed.key, document)

    fresh = Catalog(store)
    assert fresh.finish(dead) == [], "one's own saves are not finished"
    assert fresh.finish(fresh.next_generation()) == [whole]
    assert fresh.saves() == [before, whole]
    assert np.array_equal(read_save(store, whole)["w"], state(20)["w"])
    assert fresh.finish(fresh.next_generation()) == []


def test_finish_leaves_alone_what_was_superseded(catalog: Catalog) -> None:
    """Its step would lie behind the head of history, or before a generation that went another way."""
    put_parts(catalog, make_generation(catalog, 1), 20, state(20))
    make_generation(catalog, 2)
    assert catalog.finish(catalog.next_generation()) == []


def test_describe_is_one_line_of_json() -> None:
    assert describe(SaveFailed("step 5: x")) == "step 5: x"
    assert describe(ZeroDivisionError("by 0")) == "ZeroDivisionError: by 0"
    assert len(describe(SaveFailed("x" * 9999))) == 2000
