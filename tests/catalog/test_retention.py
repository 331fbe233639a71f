"""Retention on real stores: what goes, when, and that nothing that is listed is ever hurt."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import age, all_keys, keys_of, make_generation, make_root, make_save, put_parts, read_save, resealed, state
from typing_extensions import Buffer, override

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer, finish_saves
from ckptlib.catalog.retention import GRACE, Keep, Sweep, referenced, sweep
from ckptlib.errors import CorruptData, StoreError, StoreFull, Superseded
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import TrashRecord
from ckptlib.stores import Store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import _HookedStore
from ckptlib.verify.root import verify_root

T = TypeVar("T")

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
LATER_S = GRACE.total_seconds() + HOUR_S


def steps(saves: object) -> list[int]:
    return [save.step for save in saves]  # type: ignore[attr-defined]


def listed_steps_are_whole(store: Store) -> list[int]:
    """Reads every step that is listed, all of it; returns their numbers."""
    found = Catalog(store).saves()
    for save in found:
        content = read_save(store, save)
        assert content.keys() == state(0).keys()
        for name, expected in state(save.step).items():
            assert np.array_equal(content[name], expected), (save, name)
    return steps(found)


# -- Keep

SAVES = st.lists(st.builds(SaveId, st.integers(0, 60), st.just(GenerationId(1, "0" * 8))), unique=True)


@given(SAVES, st.integers(1, 8), st.none() | st.integers(1, 10))
def test_choose_drops_all_but_the_newest_and_the_multiples(saves: list[SaveId], last: int, every: int | None) -> None:
    dropped = Keep(last, every).choose(saves)
    assert dropped == sorted(dropped)
    assert set(dropped) <= set(saves)
    for save in saves:
        newer = sum(other.step > save.step for other in saves)
        stays = newer < last or (every is not None and save.step % every == 0)
        assert (save in dropped) == (not stays)
    if saves:
        assert max(saves) not in dropped


@given(SAVES, st.integers(1, 8), st.none() | st.integers(1, 10))
def test_choose_again_drops_nothing_more(saves: list[SaveId], last: int, every: int | None) -> None:
    keep = Keep(last, every)
    assert keep.choose([save for save in saves if save not in keep.choose(saves)]) == []


def test_keep_refuses_what_would_drop_the_newest() -> None:
    with pytest.raises(ValueError, match="last >= 1"):
        Keep(last=0)
    with pytest.raises(ValueError, match="every=0"):
        Keep(every=0)


def test_grace_must_be_twice_the_save_deadline(store: Store) -> None:
    catalog = make_root(store, save_deadline_s=HOUR_S)
    save = make_save(catalog, make_generation(catalog), 1, state(1))
    with pytest.raises(ValueError, match="at least 2:00:00, twice the save deadline"):
        sweep(catalog, Keep(grace=timedelta(hours=1.9)), None)
    assert keys_of(store, save)
    sweep(catalog, Keep(grace=timedelta(hours=2)), None)


def test_without_keep_the_grace_follows_the_save_deadline(store: Store) -> None:
    catalog = make_root(store, save_deadline_s=DAY_S)
    save, _ = put_parts(catalog, make_generation(catalog), 1, state(1))
    age(store, 1.5 * DAY_S)
    assert sweep(catalog, None, None).condemned == ()
    age(store, DAY_S)
    assert sweep(catalog, None, None).condemned == (save,)


# -- two passes


def test_a_dropped_step_waits_a_grace_period_and_goes_without_a_trace(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step), world_size=2) for step in range(5)]
    before = {save: keys_of(store, save) for save in saves}

    first = sweep(catalog, Keep(last=2), generation)
    assert steps(first.dropped) == [0, 1, 2]
    assert (first.condemned, first.deleted, steps(first.waiting)) == ((), (), [0, 1, 2])
    assert steps(catalog.saves()) == [3, 4]
    for save in saves[:3]:
        assert keys_of(store, save) == before[save] - {save.manifest_key} | {save.trash_key}

    age(store, LATER_S - 2 * HOUR_S)
    again = sweep(catalog, Keep(last=2), generation)
    assert (again.dropped, again.deleted, again.waiting) == ((), (), first.waiting)

    age(store, 2 * HOUR_S)
    sizes = {entry.key: entry.nbytes for entry in store.scan("")}
    last = sweep(catalog, Keep(last=2), generation)
    expected = set().union(*(before[save] - {save.manifest_key} | {save.trash_key} for save in saves[:3]))
    assert {entry.key for entry in last.deleted} == expected
    assert last.nbytes_deleted == sum(sizes[key] for key in expected)
    assert last.waiting == ()
    assert not any(keys_of(store, save) for save in saves[:3])
    assert listed_steps_are_whole(store) == [3, 4]
    assert sweep(catalog, Keep(last=2), generation) == Sweep((), (), (), ())


def test_parts_go_before_packs_and_the_record_last(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    for step in range(2):
        make_save(catalog, generation, step, state(step), world_size=2)
    sweep(catalog, Keep(last=1), None)
    age(store, LATER_S)
    order = [entry.key.partition("/")[0] for entry in sweep(catalog, Keep(last=1), None).deleted]
    assert order == ["parts"] * 2 + ["packs"] * 2 + ["trash"]


def test_dry_run_tells_the_same_and_changes_nothing(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    for step in range(4):
        make_save(catalog, generation, step, state(step))
    put_parts(catalog, generation, 9, state(9))
    for _ in range(4):
        before = store.scan("")
        told = sweep(catalog, Keep(last=1), generation, dry_run=True)
        assert store.scan("") == before
        assert sweep(catalog, Keep(last=1), generation) == told
        age(store, LATER_S)
    assert listed_steps_are_whole(store) == [3]


def test_steps_that_are_multiples_stay(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    for step in range(100, 800, 100):
        make_save(catalog, generation, step, state(step))
    sweep(catalog, Keep(last=2, every=300), generation)
    assert listed_steps_are_whole(store) == [300, 600, 700]


def test_an_interrupted_drop_starts_its_grace_period_anew(store: Store, catalog: Catalog) -> None:
    """Its record is older than the grace period, but readers could look the step up until now."""
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(3)]
    for save in saves[:2]:
        store.put(save.trash_key, TrashRecord(save, "interrupted").encode())
    age(store, LATER_S)
    found = sweep(catalog, Keep(last=2), generation)
    assert (found.dropped, found.deleted) == ((saves[0],), ())
    assert saves[0].trash_key in all_keys(store)
    assert saves[1].trash_key not in all_keys(store)
    assert listed_steps_are_whole(store) == [1, 2]


# -- crashed saves


def test_a_crashed_save_becomes_trash_when_all_of_it_is_old(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1))
    age(store, LATER_S)
    save, _ = put_parts(catalog, generation, 2, state(2))
    assert sweep(catalog, None, generation) == Sweep((), (), (), (save,))
    age(store, LATER_S)
    store.put(save.pack_key(0, "ffffffff", 0), b"of an attempt that goes on")
    assert sweep(catalog, None, generation) == Sweep((), (), (), (save,))
    age(store, LATER_S)
    found = sweep(catalog, None, generation)
    assert (found.condemned, found.deleted) == ((save,), ())
    age(store, LATER_S)
    found = sweep(catalog, None, generation)
    assert len(found.deleted) == 4
    assert keys_of(store, save) == set()
    assert listed_steps_are_whole(store) == [1]


def test_what_a_new_generation_finishes_is_not_deleted(store: Store, catalog: Catalog) -> None:
    """It may have found the parts right before they became trash, and commit right after."""
    dead = make_generation(catalog, 1)
    save, names = put_parts(catalog, dead, 1, state(1))
    age(store, LATER_S)
    assert sweep(catalog, None, None).condemned == (save,)
    Committer(catalog).commit(save, names)
    age(store, LATER_S)
    assert sweep(catalog, None, None).deleted == ()
    assert save.trash_key not in all_keys(store)
    assert listed_steps_are_whole(store) == [1]


def test_trash_is_not_committed_again(store: Store, catalog: Catalog) -> None:
    dead = make_generation(catalog, 1)
    for step in range(2):
        make_save(catalog, dead, step, state(step))
    sweep(catalog, Keep(last=1), None)
    alive = make_generation(catalog, 2)
    assert finish_saves(catalog, alive) == []
    assert steps(catalog.saves()) == [1]


# -- history


def test_steps_behind_a_rewind_go_only_when_asked(store: Store, catalog: Catalog) -> None:
    old = make_generation(catalog, 1)
    saves = [make_save(catalog, old, step, state(step)) for step in (100, 200, 300)]
    new = make_generation(catalog, 2, resumed_from=saves[0])
    make_save(catalog, new, 150, state(150))
    assert sweep(catalog, Keep(last=2), new).dropped == ()
    assert sweep(catalog, Keep(last=2), new, abandoned=True).dropped == (saves[1], saves[2])
    assert sorted(listed_steps_are_whole(store)) == [100, 150]


def test_the_step_that_a_job_came_from_stays_until_it_has_its_own(store: Store, catalog: Catalog) -> None:
    old = make_generation(catalog, 1)
    saves = [make_save(catalog, old, step, state(step)) for step in (100, 200, 300)]
    new = make_generation(catalog, 2, resumed_from=saves[0])
    sweep(catalog, Keep(last=1), new, abandoned=True)
    assert listed_steps_are_whole(store) == [100, 300]
    make_save(catalog, new, 110, state(110))
    sweep(catalog, Keep(last=1), new, abandoned=True)
    assert listed_steps_are_whole(store) == [110]


def test_a_superseded_job_deletes_nothing(store: Store, catalog: Catalog) -> None:
    old = make_generation(catalog, 1)
    for step in range(3):
        make_save(catalog, old, step, state(step))
    make_generation(catalog, 2)
    before = store.scan("")
    with pytest.raises(Superseded):
        sweep(catalog, Keep(last=1), old)
    assert store.scan("") == before


# -- layouts, generations, strangers


def layouts(store: Store) -> int:
    return len(store.scan(keys.LAYOUTS))


def test_layouts_go_when_no_step_and_no_trash_may_name_them(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1), world_size=2)
    make_save(catalog, generation, 2, state(2), world_size=1)
    age(store, LATER_S)
    sweep(catalog, Keep(last=1), None)
    assert layouts(store) == 2, "a reader of step 1 may still need its layout"
    age(store, LATER_S)
    sweep(catalog, Keep(last=1), None)
    assert layouts(store) == 1
    assert listed_steps_are_whole(store) == [2]


def test_a_layout_that_is_deleted_too_early_comes_back_with_the_commit(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1))
    _, names = put_parts(catalog, generation, 2, state(2))
    for entry in store.scan(keys.LAYOUTS):
        store.delete(entry.key)
    Committer(catalog).commit(names[0].save, names)
    assert listed_steps_are_whole(store) == [1, 2]


def test_layouts_are_left_alone_where_a_manifest_is_damaged(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in (1, 2)]
    store.delete(saves[0].manifest_key)
    store.put(saves[0].manifest_key, b"torn")
    catalog.put_layout("0" * 32, b"nobody's")
    age(store, LATER_S)
    sweep(catalog, None, None)
    assert layouts(store) == 2
    assert read_save(store, saves[1]).keys() == state(0).keys()


def test_what_is_not_ours_is_left_alone(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    save = make_save(catalog, generation, 1, state(1))
    make_save(catalog, generation, 2, state(2))
    foreign = {"README.md", f"{save.packs_prefix}notes.txt", "trash/mine.json", "parts/x/y.json", "steps/1.json"}
    for key in foreign:
        store.put(key, b"mine")
    for _ in range(3):
        sweep(catalog, Keep(last=1), None)
        age(store, LATER_S)
    assert foreign <= all_keys(store)
    assert generation.key in all_keys(store)
    assert keys_of(store, save) == set()


def test_no_clock_is_left_behind(store: Store, catalog: Catalog) -> None:
    make_save(catalog, make_generation(catalog), 1, state(1))
    sweep(catalog, None, None)
    assert store.scan(keys.TRASH) == []
    store.put("trash/clock-deadbeef.json", b"{}\n")
    sweep(catalog, None, None)
    assert len(store.scan(keys.TRASH)) == 1, "it may be another sweep's"
    age(store, LATER_S)
    sweep(catalog, None, None)
    assert store.scan(keys.TRASH) == []


def test_referenced_is_what_is_committed(catalog: Catalog) -> None:
    generation = make_generation(catalog)
    save = make_save(catalog, generation, 1, state(1))
    put_parts(catalog, generation, 2, state(2))
    assert referenced(catalog) == {save}


# -- a full store


class FullStore(_HookedStore):
    """Takes no byte before one is deleted."""

    def __init__(self, inner: Store, takes_empty: bool) -> None:
        super().__init__(inner, "full")
        self._takes_empty = takes_empty
        self._full = True

    @override
    def _run(self, op: str, key: str, act: Callable[[Buffer], T], data: Buffer = b"") -> T:
        if op == "put" and self._full and (len(memoryview(data)) or not self._takes_empty):
            raise StoreFull(f"{key}: no space")
        if op == "delete" and key.startswith("packs/"):
            self._full = False
        return act(data)


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
    assert steps(found.dropped) == [2]
    assert listed_steps_are_whole(store) == [3]
    make_save(catalog, generation, 4, state(4))
    with pytest.raises(StoreFull):  # nothing is due yet
        sweep(Catalog(FullStore(store, takes_empty)), Keep(last=1), None)
    assert listed_steps_are_whole(store) == [3, 4]


# -- crashes


class Crash(StoreError):
    pass


class CrashingStore(_HookedStore):
    """Does `left` operations, and from then on nothing at all."""

    def __init__(self, inner: Store, left: int) -> None:
        super().__init__(inner, "crash")
        self._left = left

    @override
    def _run(self, op: str, key: str, act: Callable[[Buffer], T], data: Buffer = b"") -> T:
        self._left -= 1
        if self._left < 0:
            raise Crash(f"{op} {key}")
        return act(data)


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
        copied._objects = dict(store._objects)
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
            "generations",
            "layouts",
            "packs",
            "parts",
            "steps",
        }
        assert listed_steps_are_whole(inner) == [5, 6]
        assert [len(inner.scan(prefix)) for prefix in (keys.PACKS, keys.PARTS, keys.LAYOUTS)] == [2, 2, 1]
        if not crashed:
            break
        nth += 1
    assert nth > 20


# -- histories of which something is lost

GENERATIONS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 3)), min_size=2, max_size=4)
"""Of each: which earlier step it goes on from, counted from the newest, and how many it has saved."""


def make_history(catalog: Catalog, drawn: list[tuple[int, int]]) -> list[GenerationId]:
    saves: list[SaveId] = []
    generations = []
    for number, (back, num_saves) in enumerate(drawn, 1):
        origin = saves[-1 - back] if back < len(saves) else None
        generation = make_generation(catalog, number, resumed_from=origin)
        first = 0 if origin is None else origin.step + 1
        saves += [make_save(catalog, generation, first + i, {"w": np.zeros(1)}) for i in range(num_saves)]
        generations.append(generation)
    return generations


def lose(store: MemoryStore, generation: GenerationId, how: str) -> None:
    data, modified = store._objects.pop(generation.key)
    if how == "altered":
        store._objects[generation.key] = (data[:-5] + b"!" + data[-4:], modified)
    elif how == "another's":
        store._objects[generation.key] = (resealed(data, nonce="f" * 8), modified)


@settings(max_examples=60)
@given(GENERATIONS, st.data(), st.integers(1, 3), st.booleans())
def test_a_lost_record_drops_nothing_that_is_on_the_history(
    drawn: list[tuple[int, int]], data: st.DataObject, last: int, abandoned: bool
) -> None:
    store = MemoryStore()
    generations = make_history(make_root(store), drawn)
    whole = sweep(Catalog(store), Keep(last), None, dry_run=True, abandoned=abandoned)
    unwanted = sweep(Catalog(store), Keep(last), None, dry_run=True)
    for generation in data.draw(st.sets(st.sampled_from(generations), min_size=1)):
        lose(store, generation, data.draw(st.sampled_from(["gone", "altered", "another's"])))
    before = dict(store._objects)
    for dry_run in (True, False):
        with pytest.raises(CorruptData, match=r"history is incomplete.*so nothing is dropped"):
            sweep(Catalog(store), Keep(last), None, dry_run=dry_run, abandoned=abandoned)
        assert store._objects == before
    assert {*whole.dropped} >= {*unwanted.dropped}
    live = sweep(Catalog(store), Keep(last), generations[-1])
    assert {*live.dropped} <= {*unwanted.dropped}
    assert list(verify_root(Catalog(store))), "and verify knows"


def test_gc_does_not_take_the_past_for_what_a_rewind_left_behind(store: Store, catalog: Catalog) -> None:
    """The head's record is all that says that it goes on from the first generation."""
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in range(3)]
    head = make_generation(catalog, 2, resumed_from=saves[-1])
    saves.append(make_save(catalog, head, 3, state(3)))
    store.delete(head.key)
    before = all_keys(store)
    with pytest.raises(CorruptData, match=rf"{head.key}: no such object.*Put the record back"):
        sweep(Catalog(store), Keep(last=1), None, abandoned=True)
    assert all_keys(store) == before


def test_a_lost_record_in_the_middle_is_noticed_when_its_steps_are_gone(store: Store, catalog: Catalog) -> None:
    first, second, third = (GenerationId(number, f"{number:08x}") for number in (1, 2, 3))
    make_generation(catalog, 1)
    past = [make_save(catalog, first, step, state(step)) for step in range(2)]
    make_generation(catalog, 2, resumed_from=past[-1])
    middle = make_save(catalog, second, 2, state(2))
    make_generation(catalog, 3, resumed_from=middle)
    newest = [make_save(catalog, third, step, state(step)) for step in (3, 4)]
    store.delete(middle.manifest_key)
    store.delete(second.key)
    with pytest.raises(CorruptData, match="history is incomplete"):
        sweep(Catalog(store), Keep(last=5), None, abandoned=True)
    (found,) = verify_root(Catalog(store))
    assert (found.damage, found.key) == ("missing", second.key)
    assert sweep(Catalog(store), Keep(last=1), third).dropped == (newest[0],)
    assert listed_steps_are_whole(store) == [0, 1, 4]


def test_a_live_job_goes_on_along_what_is_left_of_history(
    store: Store, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in range(3)]
    head = make_generation(catalog, 2, resumed_from=saves[-1])
    newer = [make_save(catalog, head, step, state(step)) for step in (3, 4, 5)]
    store.delete(first.key)
    age(store, LATER_S)
    store.delete(head.key)
    assert sweep(Catalog(store), Keep(last=2), head).dropped == (newer[0],)
    assert "history is incomplete, and only steps on what is left of it are dropped" in caplog.text
    assert listed_steps_are_whole(store) == [0, 1, 2, 4, 5]
    age(store, LATER_S)
    assert sweep(Catalog(store), Keep(last=2), head).deleted, "what was dropped goes all the same"
