"""Retention on a store that is full, and one that dies under it: no step that is listed is ever hurt."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.actors import ActorStore, no_chance
from helpers.actors import Crash as Died
from helpers.crashing_store import Crash, CrashingStore
from helpers.inside import objects_of
from helpers.interleaved import Actor
from support import (
    age,
    all_keys,
    listed_steps_are_whole,
    make_generation,
    make_root,
    make_save,
    of_version,
    put_parts,
    replace_object,
    state,
)
from typing_extensions import Buffer, override

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.clock import CLOCK
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.retention import drop_unkept, sweep
from ckptlib.errors import ObjectUnreadable, StoreFull, Superseded
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import TrashRecord
from ckptlib.policy.keep import GRACE, Keep
from ckptlib.stores import Store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import _HookedStore

LATER_S = GRACE.total_seconds() + 3600


# -- a full store


class FullStore(_HookedStore):
    """Takes no byte before one is deleted."""

    def __init__(self, inner: Store, takes_empty: bool) -> None:
        super().__init__(inner, "full")
        self._takes_empty = takes_empty
        self._full = True

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        if op == "put" and self._full and (len(memoryview(data)) or not self._takes_empty):
            raise StoreFull(f"{key}: no space")
        if op == "delete" and key.startswith("packs/"):
            self._full = False
        yield data


@pytest.mark.parametrize("takes_empty", [True, False])
def test_what_is_due_goes_from_a_full_store(store: Store, catalog: Catalog, takes_empty: bool) -> None:
    """That is when it is needed most. Where there is no room to ask the clock, the newest object tells the time."""
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1))
    make_save(catalog, generation, 2, state(2))
    sweep(catalog, Keep(last=1), None)
    age(store, LATER_S)
    make_save(catalog, generation, 3, state(3))
    found = sweep(Catalog(FullStore(store, takes_empty)), Keep(last=1), None)
    assert {entry.key.partition("/")[0] for entry in found.deleted} == {"parts", "packs", "trash"}
    assert [save.step for save in found.dropped] == [2]
    assert listed_steps_are_whole(store) == [3]
    make_save(catalog, generation, 4, state(4))
    with pytest.raises(StoreFull):  # nothing is due yet
        sweep(Catalog(FullStore(store, takes_empty)), Keep(last=1), None)
    assert listed_steps_are_whole(store) == [3, 4]


# -- crashes


def make_busy_root(store: Store) -> GenerationId:
    """Steps to drop, trash whose time has come, a crashed save, an interrupted drop, and an old layout."""
    catalog = make_root(store)
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1), world_size=2)
    make_save(catalog, generation, 2, state(2))
    sweep(catalog, Keep(last=1), generation)
    put_parts(catalog, generation, 3, state(3))
    age(store, LATER_S)
    saves = [make_save(catalog, generation, step, state(step)) for step in (4, 5, 6)]
    store.put(saves[0].trash_key, TrashRecord(saves[0], "interrupted").encode())
    return generation


def copy_of(store: Store, directory: Path) -> Store:
    if isinstance(store, MemoryStore):
        copied = MemoryStore()
        objects_of(copied).update(objects_of(store))
        return copied
    shutil.copytree(store.url.removeprefix("file://"), directory)  # ages are kept
    return LocalStore(str(directory))


def test_a_crash_anywhere_hurts_no_listed_step_and_is_made_good(store: Store, tmp_path: Path) -> None:
    generation = make_busy_root(store)
    nth = 0
    while True:
        inner = copy_of(store, tmp_path / str(nth))
        try:
            sweep(Catalog(CrashingStore(inner, nth)), Keep(last=2), generation)
            crashed = False
        except Crash:
            crashed = True
        kept = listed_steps_are_whole(inner)
        assert kept[-2:] == [5, 6]
        assert set(kept) <= {2, 4, 5, 6}
        assert finish_saves(Catalog(inner), GenerationId(99, "0" * 8)) in ([], [SaveId(3, generation)])
        for _ in range(4):
            sweep(Catalog(inner), Keep(last=2), generation)
            assert listed_steps_are_whole(inner)[-2:] == [5, 6]
            age(inner, LATER_S)
        assert {key.partition("/")[0] for key in all_keys(inner)} == {
            "ckptlib.json",
            "copies",
            "generations",
            "layouts",
            "packs",
            "parts",
            "steps",
        }
        assert listed_steps_are_whole(inner) == [5, 6]
        assert [len(inner.scan(prefix)) for prefix in (keys.PACKS, keys.PARTS, keys.LAYOUTS, keys.COPIES)] == [
            2,
            2,
            1,
            2 + len(inner.scan(keys.GENERATIONS)),
        ]
        if not crashed:
            break
        nth += 1
    assert nth > 20


def test_what_a_power_loss_brings_back_hurts_no_listed_step_and_goes_again() -> None:
    """No deletion is flushed, so any of a sweep's may be undone: all of them, or one of a few."""
    before, nth, crashed = MemoryStore(), 0, True
    generation = make_busy_root(before)
    while crashed:
        inner = copy_of(before, Path())
        try:
            sweep(Catalog(CrashingStore(inner, nth)), Keep(last=2), generation)
            crashed = False
        except Crash:
            pass
        there, was_there = objects_of(inner), objects_of(before)
        gone = sorted(was_there.keys() - there.keys())
        there.update({key: was_there[key] for key in (gone, gone[::2], gone[1::2])[nth % 3]})
        assert listed_steps_are_whole(inner)[-2:] == [5, 6]
        finished = finish_saves(Catalog(inner), GenerationId(99, "0" * 8))
        assert {save.step for save in finished} <= {1, 3}, "a step of which all is back"
        for _ in range(5):
            sweep(Catalog(inner), Keep(last=2), generation)
            assert listed_steps_are_whole(inner)[-2:] == [5, 6]
            age(inner, LATER_S)
        assert listed_steps_are_whole(inner) == [5, 6]
        left = [len(inner.scan(prefix)) for prefix in (keys.PACKS, keys.PARTS, keys.LAYOUTS, keys.TRASH)]
        assert left == [2, 2, 1, 0]
        nth += 1
    assert nth > 20


def test_a_step_that_comes_to_be_there_as_its_old_record_is_seen_stays_whole() -> None:
    """Its committer looks for the record behind the manifest, and the sweep for the manifest behind the record."""
    catalog = make_root(MemoryStore())
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1))
    save, names = put_parts(catalog, generation, 2, state(2))
    catalog.store.put(save.trash_key, TrashRecord(save, "never committed").encode())
    age(catalog.store, LATER_S)
    document = Committer(catalog).prover.manifest_of(save, names).encode()
    actor = ActorStore(catalog.store)  # type: ignore[arg-type]

    def commit(op: str, key: str) -> None:
        if (op, key) == ("scan", keys.TRASH) and not catalog.is_committed(save):
            catalog.store.put(save.manifest_key, document)

    actor.before = commit
    sweep(Catalog(actor), Keep(last=2), None)
    assert listed_steps_are_whole(catalog.store) == [1, 2]


# -- a job that comes to use what nothing named


class Overtaken(LocalStore):
    """Another process saves right before a layout is deleted."""

    def __init__(self, path: str, happens: Callable[[], SaveId], can_be_read: bool) -> None:
        """`can_be_read`: whether the step that comes to be there can."""
        super().__init__(path)
        self._happens: Callable[[], SaveId] | None = happens
        self._can_be_read = can_be_read
        self._unreadable = ""

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        if key == self._unreadable:
            raise ObjectUnreadable(f"{key}: Input/output error")
        return super().get(key, offset, nbytes)

    @override
    def delete(self, *names: str) -> None:
        if self._happens is not None and any(name.startswith(keys.LAYOUTS) for name in names):
            happens, self._happens = self._happens, None
            save = happens()
            self._unreadable = "" if self._can_be_read else save.manifest_key
        super().delete(*names)


class Unreadable(LocalStore):
    """A sector of a layout is bad."""

    def __init__(self, path: str, key: str) -> None:
        super().__init__(path)
        self._key = key

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        if key == self._key:
            raise ObjectUnreadable(f"{key}: Input/output error")
        return super().get(key, offset, nbytes)


def make_unnamed_layout(store: Store) -> SaveId:
    """Of step 1, which is gone; returns step 2."""
    catalog = make_root(store)
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1), world_size=2)
    last = make_save(catalog, generation, 2, state(2))
    age(store, LATER_S)
    sweep(catalog, Keep(last=1), None)
    age(store, LATER_S)
    return last


def test_a_layout_that_cannot_be_read_stays_and_hinders_no_sweep(tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path))
    last = make_unnamed_layout(store)
    named = {keys.layout_key(digest) for digest in Catalog(store).manifest(last).layouts}
    (bad,) = {entry.key for entry in store.scan(keys.LAYOUTS)} - named
    swept = sweep(Catalog(Unreadable(str(tmp_path), bad)), Keep(last=1), None)
    assert keys.copy_key(bad) in {entry.key for entry in swept.deleted}
    assert {entry.key for entry in store.scan(keys.LAYOUTS)} == {bad, *named}
    assert listed_steps_are_whole(store) == [2]


@pytest.mark.parametrize("can_be_read", [True, False])
def test_a_layout_that_a_step_comes_to_name_before_it_is_deleted(tmp_path: Path, can_be_read: bool) -> None:
    """As of a job that goes back to an earlier number of ranks: its step had lost the layout and did not load."""
    store = LocalStore(str(tmp_path))
    last = make_unnamed_layout(store)

    def start_again() -> SaveId:
        other = Catalog(LocalStore(str(tmp_path)))
        other.root()
        return make_save(other, make_generation(other, 2, resumed_from=last), 3, state(3), world_size=2)

    swept = sweep(Catalog(Overtaken(str(tmp_path), start_again, can_be_read)), Keep(last=3), None)
    assert not [entry for entry in swept.deleted if "layouts/" in entry.key]
    assert listed_steps_are_whole(store) == [2, 3]
    assert len([*store.scan(keys.LAYOUTS)]) == len([*store.scan(keys.copy_key(keys.LAYOUTS))]) == 2


# -- a sweep that stands still between its listings and its drops


def test_a_record_that_another_sweep_left_meanwhile_is_no_reason_to_delete_at_once() -> None:
    """The steps were listed until their manifests went: their bytes wait from then on."""
    store = MemoryStore()
    catalog = make_root(store)
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(3)]

    def dies_before_its_drops(op: str, key: str) -> None:
        if op == "delete" and key.startswith(keys.STEPS):
            raise Died

    dies = ActorStore(store)
    dies.before = dies_before_its_drops
    with no_chance(), Actor(store, lambda store: sweep(Catalog(store), Keep(last=1), None)) as suspended:
        suspended.go(lambda operation: operation == ("get", saves[2].manifest_key))
        with pytest.raises(Died):
            sweep(Catalog(dies), Keep(last=1), None)
        age(store, 7 * LATER_S)
        suspended.go()
    assert suspended.error is None
    assert catalog.saves() == saves[2:]
    assert sweep(Catalog(store), Keep(last=1), None).deleted == ()
    age(store, LATER_S)
    sweep(Catalog(store), Keep(last=1), None)
    assert not store.scan(saves[0].packs_prefix)
    assert listed_steps_are_whole(store) == [2]


def test_a_sweep_stops_where_a_newer_job_begins_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever that is, it deletes no more than it was about to."""
    monkeypatch.setattr("ckptlib.catalog.retention.BATCH", 1)
    made = MemoryStore()
    with no_chance():
        generation = make_busy_root(made)
    stopped = 0
    for num in range(200):
        store = copy_of(made, Path())
        assert isinstance(store, MemoryStore)
        with no_chance(), Actor(store, lambda store: sweep(Catalog(store), Keep(last=1), generation)) as sweeper:
            sweeper.go_on(num)
            if sweeper.done:
                break
            make_generation(Catalog(store), 2, Catalog(store).saves()[-1])
            before = all_keys(store)
            sweeper.go()
        gone = {key for key in before - all_keys(store) if not key.startswith(CLOCK)}
        assert len(gone) <= 1, (num, gone)
        stopped += isinstance(sweeper.error, Superseded)
    assert sweeper.done
    assert stopped > 20


def test_a_stale_record_is_put_back_where_another_sweep_has_dropped_the_step_meanwhile() -> None:
    """Without it, the next job would take the parts for a save of a crash, and have the step again."""
    store = MemoryStore()
    catalog = make_root(store)
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(2)]
    store.put(saves[0].trash_key, TrashRecord(saves[0], "interrupted").encode())
    age(store, LATER_S)

    def other_sweep(op: str, key: str) -> None:
        if (op, key) == ("delete", saves[0].trash_key):
            store.delete(saves[0].manifest_key)

    overtaken = ActorStore(store)
    overtaken.before = other_sweep
    sweep(Catalog(overtaken), Keep(last=2), None)
    assert catalog.saves() == saves[1:]
    assert saves[0].trash_key in all_keys(store)
    assert finish_saves(Catalog(store), GenerationId(2, "0" * 8)) == []
    assert listed_steps_are_whole(store) == [1]


# -- a manifest that cannot be read just now


@pytest.mark.parametrize("whole_sweep", [True, False])
@pytest.mark.parametrize("newer", [True, False])
def test_a_live_job_drops_no_step_whose_manifest_cannot_be_read_now(
    tmp_path: Path, newer: bool, whole_sweep: bool
) -> None:
    """A bad sector, or a newer ckptlib's: what it is kept for, and what it uses, is not known."""
    store = LocalStore(str(tmp_path))
    catalog = make_root(store)
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(4)]
    key = saves[1].manifest_key
    if newer:
        replace_object(store, key, of_version(store.get(key), 3))
    job = Catalog(store if newer else Unreadable(str(tmp_path), key))
    if whole_sweep:
        sweep(job, Keep(last=1), generation)
    else:
        drop_unkept(job, Keep(last=1), generation, broken=())
    assert catalog.saves() == [saves[1], saves[3]]
    assert saves[1].trash_key not in all_keys(store)
