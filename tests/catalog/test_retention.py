"""Retention on real stores: what goes, when, and that nothing that is listed is ever hurt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from helpers.flushed import ForgetfulDisk, Killed
from support import (
    age,
    all_keys,
    keys_of,
    listed_steps_are_whole,
    make_generation,
    make_root,
    make_save,
    put_parts,
    read_save,
    replace_object,
    state,
)
from typing_extensions import override

from ckptlib.catalog import clock
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.retention import Sweep, drop, sweep
from ckptlib.errors import CorruptData, StoreError, Superseded
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import TrashRecord
from ckptlib.policy.keep import GRACE, Keep
from ckptlib.stores import Entry, Store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
LATER_S = GRACE.total_seconds() + HOUR_S


def steps(saves: object) -> list[int]:
    return [save.step for save in saves]  # type: ignore[attr-defined]


def test_grace_must_be_twice_the_save_deadline(store: Store) -> None:
    catalog = make_root(store, save_deadline_s=HOUR_S)
    save = make_save(catalog, make_generation(catalog), 1, state(1))
    with pytest.raises(ValueError, match="at least 2:00:00, twice the save deadline"):
        sweep(catalog, Keep(grace=timedelta(hours=1.9)), None)
    assert keys_of(store, save)
    sweep(catalog, Keep(grace=timedelta(hours=2)), None)


def test_only_uploads_of_names_of_the_format_are_cleaned() -> None:
    asked: list[Callable[[str], bool]] = []

    class Cleaned(MemoryStore):
        @override
        def clean(self, before: float, is_ours: Callable[[str], bool]) -> None:
            asked.append(is_ours)

    sweep(make_root(Cleaned()), None, None)
    (is_ours,) = asked
    assert is_ours("packs/000000000100-000003-aaaaaaaa/000001-25b4d951-000000.safetensors")
    assert not is_ours("run1/packs/000000000100-000003-aaaaaaaa/000001-25b4d951-000000.safetensors")
    assert not is_ours("datasets/laion.tar")


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


def test_a_dry_run_leaves_to_another_sweep_what_that_one_is_dropping(store: Store, catalog: Catalog) -> None:
    """Its record is young, and it is about to delete the manifest."""
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(3)]
    store.put(saves[0].trash_key, TrashRecord(saves[0], "dropped by retention").encode())
    told = sweep(catalog, Keep(last=1), generation, dry_run=True)
    assert told.dropped == (saves[1],)
    assert sweep(catalog, Keep(last=1), generation) == told
    assert listed_steps_are_whole(store) == [0, 2]


def test_the_first_step_from_each_multiple_on_stays(store: Store, catalog: Catalog) -> None:
    """A multiple itself, or what was saved later than it was due. One that lacks objects is not the first."""
    generation = make_generation(catalog)
    for step in (100, 300, 400, 605, 610, 700, 900, 950, 1100):
        save = make_save(catalog, generation, step, state(step))
        if step == 900:
            store.delete(*(entry.key for entry in store.scan("packs/") if str(save) in entry.key))
    sweep(catalog, Keep(last=2, every=300), generation)
    assert [save.step for save in catalog.saves()] == [300, 605, 900, 950, 1100]


def test_a_step_is_durable_before_those_go_that_it_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its committer may have died before it was, or have failed to flush it, and a sweep drops what came before."""
    catalog = make_root(LocalStore(str(tmp_path)))
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1))
    save, names = put_parts(catalog, generation, 2, state(2))
    manifest, power = Committer(catalog).prover.manifest_of(save, names), ForgetfulDisk(monkeypatch)
    power.links_left = 1

    def refuse(self: LocalStore, prefix: str) -> None:
        raise StoreError(f"{prefix} cannot be flushed")

    with pytest.raises(Killed):
        catalog.store.put(save.manifest_key, manifest.encode())
    with monkeypatch.context() as patched:
        patched.setattr(LocalStore, "flush", refuse)
        with pytest.raises(StoreError):
            sweep(catalog, Keep(last=1), None)
        assert not catalog.store.scan(keys.TRASH)
    assert steps(sweep(catalog, Keep(last=1), None).dropped) == [1]
    power.lose_power()
    assert catalog.saves() == [save]


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


@pytest.mark.parametrize("seconds", [HOUR_S, LATER_S])
def test_a_step_that_is_dropped_by_name_has_its_grace_period_whatever_record_is_there(
    store: Store, catalog: Catalog, seconds: float
) -> None:
    """A process died between the record and the manifest; the step was listed, and read, ever since."""
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(2)]
    store.put(saves[0].trash_key, TrashRecord(saves[0], "interrupted").encode())
    age(store, seconds)
    drop(catalog, saves[0])
    age(store, DAY_S - HOUR_S)
    assert sweep(catalog, None, None).deleted == ()
    age(store, 2 * HOUR_S)
    sweep(catalog, None, None)
    assert not keys_of(store, saves[0])
    assert listed_steps_are_whole(store) == [1]


# -- crashed saves


def test_a_crashed_save_becomes_trash_when_all_of_it_is_old(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1))
    age(store, LATER_S)
    save, _ = put_parts(catalog, generation, 2, state(2))
    assert sweep(catalog, None, None) == Sweep((), (), (), (save,))
    age(store, LATER_S)
    store.put(save.pack_key(0, "ffffffff", 0), b"of an attempt that goes on")
    assert sweep(catalog, None, None) == Sweep((), (), (), (save,))
    age(store, LATER_S)
    found = sweep(catalog, None, None)
    assert (found.condemned, found.deleted) == ((save,), ())
    age(store, LATER_S)
    found = sweep(catalog, None, None)
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
    assert len(store.scan(keys.copy_key(keys.LAYOUTS))) == 1
    assert listed_steps_are_whole(store) == [2]


def test_layouts_of_a_live_job_whose_state_changes_go_with_its_steps(store: Store, catalog: Catalog) -> None:
    """It always has steps that were dropped lately: what these name stays, and no more."""
    generation, left = make_generation(catalog), []
    for step in range(1, 8):
        make_save(catalog, generation, step, {**state(step), f"samples{step}": np.zeros(step)})
        sweep(Catalog(store), Keep(last=1, grace=timedelta(seconds=LATER_S)), generation)
        left.append(layouts(store))
        age(store, 0.6 * LATER_S)
    assert left[-1] == left[-2] < 6
    assert len(store.scan(keys.copy_key(keys.LAYOUTS))) == left[-1]
    readable = {save for entry in store.scan(keys.TRASH) if (save := keys.parse_trash_key(entry.key)) is not None}
    for save in {*readable, *catalog.saves()}:
        for names in catalog.parts(save).values():
            assert Catalog(store).part(names[0])  # by its layout
    assert steps(catalog.saves()) == [7]
    assert read_save(store, *catalog.saves())["samples7"].shape == (7,)


def test_layouts_stay_where_a_trash_record_does_not_say_which_it_needs(store: Store, catalog: Catalog) -> None:
    """One of an earlier version, or of a save that never was a step."""
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, {**state(1), f"x{step}": np.zeros(1)}) for step in range(3)]
    sweep(catalog, Keep(last=1), generation)
    record = Catalog(store).trash_record(saves[1])
    replace_object(store, saves[1].trash_key, replace(record, layouts=None).encode())
    catalog.shared.put_layout("0" * 32, b"nobody's")
    age(store, LATER_S)
    for save in saves[:2]:  # young again
        replace_object(store, save.trash_key, store.get(save.trash_key))
    sweep(Catalog(store), Keep(last=1), generation)
    assert layouts(store) == 4
    replace_object(store, saves[1].trash_key, record.encode())
    sweep(Catalog(store), Keep(last=1), generation)
    assert layouts(store) == 3


def test_a_layout_that_is_deleted_too_early_comes_back_with_the_commit(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1))
    _, names = put_parts(catalog, generation, 2, state(2))
    for entry in store.scan(keys.LAYOUTS):
        store.delete(entry.key)
    Committer(catalog).commit(names[0].save, names)
    assert listed_steps_are_whole(store) == [1, 2]


def with_a_torn_manifest(store: Store, catalog: Catalog) -> tuple[GenerationId, list[SaveId]]:
    """Steps 0 to 2 of a generation; that of step 1 is torn, step 0 is trash whose time has come, and there is a layout
    that nobody names."""
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, step, state(step)) for step in range(3)]
    sweep(catalog, Keep(last=2), generation)
    replace_object(store, saves[1].manifest_key, b"torn")
    catalog.shared.put_layout("0" * 32, b"nobody's")
    age(store, LATER_S)
    return generation, saves


@pytest.mark.parametrize("dry_run", [True, False])
def test_nothing_goes_where_a_manifest_cannot_be_read(store: Store, catalog: Catalog, dry_run: bool) -> None:
    """Nobody knows which packs its step uses."""
    _, saves = with_a_torn_manifest(store, catalog)
    before = {key for key in all_keys(store) if not key.startswith(clock.CLOCK)}
    with pytest.raises(CorruptData, match=f"none is deleted: .*{saves[1].manifest_key}.* delete the object"):
        sweep(Catalog(store), Keep(last=1), None, dry_run=dry_run)
    assert {key for key in all_keys(store) if not key.startswith(clock.CLOCK)} == before
    store.delete(saves[1].manifest_key)  # as the message says
    found = sweep(Catalog(store), None, None)
    assert {keys.pack_save(entry.key) for entry in found.deleted} >= {saves[0]}
    assert listed_steps_are_whole(store) == [2]


def test_a_live_job_goes_on_where_a_manifest_cannot_be_read(
    store: Store, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    """It saves, and drops steps; what is dropped keeps its packs until the manifest can be read or is gone."""
    generation, saves = with_a_torn_manifest(store, catalog)
    make_save(catalog, generation, 3, state(3))
    store.put(saves[0].refresh_key, b"asked for: that it was done cannot be told either")
    before = all_keys(store)
    found = sweep(Catalog(store), Keep(last=1), generation)
    assert saves[1].manifest_key in caplog.text
    assert found.deleted == ()
    assert saves[2] in found.dropped
    assert before - all_keys(store) <= {save.manifest_key for save in found.dropped}
    assert layouts(store) == 2
    assert read_save(store, SaveId(3, generation)).keys() == state(0).keys()


def test_what_somebody_asked_to_refresh_is_asked_for_as_long_as_its_step_is_there(
    store: Store, catalog: Catalog
) -> None:
    """The next save may refer to its packs, though no step does yet."""
    generation = make_generation(catalog)
    first = make_save(catalog, generation, 1, state(1))
    store.put(first.refresh_key, b"asked for")
    sweep(catalog, Keep(last=1), generation)
    assert first.refresh_key in all_keys(store)
    make_save(catalog, generation, 2, state(2))
    for _ in range(2):
        sweep(catalog, Keep(last=1), generation)
    assert first.refresh_key not in all_keys(store)


def test_a_step_that_comes_to_be_as_its_trash_is_listed_loses_nothing(store: Store, catalog: Catalog) -> None:
    """Its committer dies before it finds the record. The sweep has listed the steps before, and lists them again."""
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1))
    save, names = put_parts(catalog, generation, 2, state(2))
    store.put(save.trash_key, TrashRecord(save, "never committed").encode())
    age(store, LATER_S)
    manifest = Committer(catalog).prover.manifest_of(save, names)
    scan, coming = store.scan, [manifest.encode()]

    def scan_late(prefix: str, after: str = "") -> list[Entry]:
        if prefix == keys.TRASH and coming:
            store.put(save.manifest_key, coming.pop())
        return scan(prefix, after)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "scan", scan_late)
        sweep(Catalog(store), None, None)
    assert not coming
    assert listed_steps_are_whole(store) == [1, 2]


def test_a_job_condemns_nothing_that_it_may_have_in_flight(store: Store, catalog: Catalog) -> None:
    """The clock of the store was set forward meanwhile, or its servers' clocks differ."""
    generation = make_generation(catalog)
    failed, _ = put_parts(catalog, generation, 1, state(1))
    make_save(catalog, generation, 2, state(2))
    saving, names = put_parts(catalog, generation, 3, state(3))
    age(store, LATER_S)
    assert sweep(catalog, Keep(last=1), generation).condemned == (failed,)
    Committer(catalog).commit(saving, names)
    assert listed_steps_are_whole(store) == [2, 3]


def test_what_is_not_ours_is_left_alone(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    save = make_save(catalog, generation, 1, state(1))
    make_save(catalog, generation, 2, state(2))
    foreign = {"README.md", f"{save.packs_prefix}notes.txt", "trash/mine.json", "parts/x/y.json", "steps/1.json"}
    for name in ("desktop.ini", f"{'0' * 32}.json.bak", f"old/{'0' * 32}.json"):
        foreign |= {keys.LAYOUTS + name, keys.copy_key(keys.LAYOUTS + name)}
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


def test_what_a_killed_probe_left_goes_outside_of_a_job(store: Store, catalog: Catalog) -> None:
    """A measurement has objects of 100 MiB: they stayed for ever."""
    generation = make_generation(catalog)
    make_save(catalog, generation, 1, state(1))
    left, foreign = f"probe/{'0a' * 8}", "probe/notes.txt"
    store.put(left, bytes(100))
    store.put(foreign, b"mine")
    assert sweep(catalog, None, None).deleted == (), "it may be under way"
    age(store, LATER_S)
    assert sweep(catalog, None, generation).deleted == ()
    plan = sweep(catalog, None, None, dry_run=True)
    assert left in all_keys(store)
    assert [entry.key for entry in plan.deleted] == [left]
    done = sweep(catalog, None, None)
    assert (done.deleted, done.nbytes_deleted) == (plan.deleted, 100)
    assert all_keys(store) & {left, foreign} == {foreign}


def test_a_local_tier_is_not_swept_as_a_root(store: Store, catalog: Catalog) -> None:
    """Its steps have no manifest there: they were taken for those of a crash, and deleted. The store may lack them."""
    generation = GenerationId(1, "0000000a")  # whose record is in the store
    put_parts(catalog, generation, 1, {"w": np.arange(64)}, 1)
    age(store, LATER_S)
    before = {key for key in all_keys(store) if not key.startswith(clock.CLOCK)}
    for dry_run in (True, False):
        with pytest.raises(CorruptData, match="no step, and no record of a job"):
            sweep(catalog, Keep(last=1), None, dry_run=dry_run)
    assert {key for key in all_keys(store) if not key.startswith(clock.CLOCK)} == before
