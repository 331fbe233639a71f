"""Pins: a step that was pinned stays, whatever sweeps run meanwhile and wherever they die; else `pin` says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers.actors import ActorStore, Crash, no_chance
from helpers.flushed import ForgetfulDisk, Killed
from helpers.interleaved import Actor
from helpers.objects import objects_of
from helpers.servers import ObjectStorage
from support import age, all_keys, listed_steps_are_whole, make_generation, make_root, make_save, of_version, state

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.pins import pin, unpin
from ckptlib.catalog.retention import drop, drop_unkept, sweep
from ckptlib.errors import CheckpointNotFound, FormatError, StoreError
from ckptlib.format import keys
from ckptlib.format.keys import SaveId, copy_key
from ckptlib.format.manifest import TrashRecord
from ckptlib.policy.keep import GRACE, Keep
from ckptlib.stores import Entry, Store, open_store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore

LATER_S = GRACE.total_seconds() + 3600
STALE_S = 120.0
"""Longer than the save deadline of these roots."""

KEEP = Keep(last=1)


def make_steps(catalog: Catalog, num: int = 4) -> list[SaveId]:
    generation = make_generation(catalog)
    return [make_save(catalog, generation, step, state(step)) for step in range(num)]


def test_a_pinned_step_stays_until_it_is_unpinned(store: Store, catalog: Catalog) -> None:
    saves = make_steps(catalog)
    assert pin(catalog, saves[1])
    assert not pin(catalog, saves[1]), "it was"
    for _ in range(3):
        sweep(catalog, KEEP, None, abandoned=True, exempt=True)
        age(store, LATER_S)
    assert listed_steps_are_whole(store) == [1, 3]
    assert unpin(catalog, saves[1])
    assert not unpin(catalog, saves[1])
    assert [save.step for save in sweep(catalog, KEEP, None).dropped] == [1]
    assert listed_steps_are_whole(store) == [3]
    assert not any(key.endswith(".pin") for key in all_keys(store))


def test_a_pin_that_was_there_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = make_root(LocalStore(str(tmp_path)))
    save, *_ = make_steps(catalog, 1)
    power = ForgetfulDisk(monkeypatch)
    power.links_left = 1
    with pytest.raises(Killed):
        pin(catalog, save)
    assert not pin(catalog, save)
    power.lose_power()
    assert catalog.steps().pins


def test_a_pin_is_a_new_object_each_time(store: Store, catalog: Catalog) -> None:
    """So that a removal that comes late takes away what it was meant for, and nothing else."""
    (save,) = make_steps(catalog, 1)
    pin(catalog, save)
    (first,) = catalog.steps().pins[save]
    unpin(catalog, save)
    pin(catalog, save)
    (second,) = catalog.steps().pins[save]
    assert first.key != second.key


def test_a_pin_of_a_step_that_is_gone_is_refused(store: Store, catalog: Catalog) -> None:
    saves = make_steps(catalog)
    sweep(catalog, KEEP, None)
    before = all_keys(store)
    with pytest.raises(CheckpointNotFound, match=r"step 1 .* retention has dropped it, so it cannot be pinned"):
        pin(catalog, saves[1])
    assert all_keys(store) == before


def test_a_root_whose_job_knows_no_pins_is_refused(store: Store, catalog: Catalog) -> None:
    (save,) = make_steps(catalog, 1)
    document = store.get(save.generation.key)
    store.delete(save.generation.key)
    store.put(save.generation.key, of_version(document, 1))
    with pytest.raises(FormatError, match=r"knows no pins.*Resume the job with this version first"):
        pin(Catalog(store), save)
    store.delete(save.generation.key, copy_key(save.generation.key))  # its copy tells
    store.put(save.generation.key, b"")
    store.put(copy_key(save.generation.key), of_version(document, 1))
    with pytest.raises(FormatError, match="knows no pins"):
        pin(Catalog(store), save)
    store.delete(copy_key(save.generation.key))
    assert pin(Catalog(store), save)


def test_a_record_that_is_young_leaves_the_pin_in_doubt(store: Store, catalog: Catalog) -> None:
    """A sweep died between record and manifest, or is about to go on."""
    saves = make_steps(catalog)
    store.put(saves[1].trash_key, TrashRecord(saves[1], "interrupted").encode())
    with pytest.raises(StoreError, match=r"a sweep is dropping it, or died .* Pin the step again in 1 minute: "):
        pin(catalog, saves[1], patience_s=0.0)
    age(store, STALE_S)
    pin(catalog, saves[1], patience_s=0.0)
    sweep(catalog, KEEP, None)
    assert listed_steps_are_whole(store) == [1, 3]


def test_what_is_pinned_and_lost_leaves_no_pin_behind(store: Store, catalog: Catalog) -> None:
    saves = make_steps(catalog)
    pin(catalog, saves[1])
    store.delete(saves[1].manifest_key)  # by accident
    sweep(catalog, KEEP, None)
    assert saves[1] in catalog.steps().pins, "the manifest may be put back"
    for _ in range(3):
        age(store, LATER_S)
        sweep(catalog, KEEP, None)
    assert not catalog.steps().pins


# -- races: operation by operation, on a store in memory


def swept(store: Store) -> object:
    return sweep(Catalog(store), KEEP, None)


def pinning(save: SaveId) -> Callable[[Store], object]:
    return lambda store: pin(Catalog(store), save, patience_s=0.0)


def copy_of(store: MemoryStore) -> MemoryStore:
    copied = MemoryStore()
    objects_of(copied).update(objects_of(store))
    return copied


def after_all(store: MemoryStore) -> list[int]:
    """What is there when whoever is still about has swept again and again."""
    for seconds in (0.0, STALE_S, LATER_S, LATER_S):
        age(store, seconds)
        swept(store)
    return listed_steps_are_whole(store)


@pytest.fixture
def made() -> Iterator[MemoryStore]:
    store = MemoryStore()
    make_steps(make_root(store))
    with no_chance():
        yield store


def target_of(store: Store) -> SaveId:
    return Catalog(store).saves()[1]


def check(store: MemoryStore, pinner: Actor) -> bool:
    """What counts: a pin that did not raise holds for ever. Returns whether it did not."""
    assert pinner.done
    assert pinner.error is None or isinstance(pinner.error, (CheckpointNotFound, StoreError)), pinner.error
    left = after_all(store)
    assert left[-1] == 3
    if pinner.error is None:
        assert left == [1, 3]
    return pinner.error is None


@pytest.mark.parametrize("pinner_begins", [False, True])
def test_a_pin_beside_a_sweep_holds_or_fails(made: MemoryStore, pinner_begins: bool) -> None:
    """One does some operations, then the other one some, then the first goes on to its end, and then the other."""
    outcomes = set()
    for num_first in range(20):
        for num_second in range(20):
            store = copy_of(made)
            with Actor(store, pinning(target_of(store))) as pinner, Actor(store, swept) as sweeper:
                first, second = (pinner, sweeper) if pinner_begins else (sweeper, pinner)
                first.go_on(num_first)
                second.go_on(num_second)
                first.go()
                second.go()
            outcomes.add(check(store, pinner))
    assert outcomes == {True, False}


def test_a_pin_beside_a_sweep_that_dies(made: MemoryStore) -> None:
    """Anywhere; the pin is put before, meanwhile and after."""
    outcomes = set()
    for num_done in range(24):
        for num_pinned in (0, 6, 24):
            store, inner = copy_of(made), None
            with Actor(store, pinning(target_of(store))) as pinner:
                pinner.go_on(num_pinned)
                inner = ActorStore(store, num_done)
                with suppress(Crash):
                    swept(inner)
                pinner.go()
            outcomes.add(check(store, pinner))
    assert outcomes == {True, False}


def test_a_pin_beside_a_drop_that_finds_an_old_record(made: MemoryStore) -> None:
    """The record is put anew, since the bytes would go at once; whoever pins sees one of the two, or is seen."""
    target = target_of(made)
    made.put(target.trash_key, TrashRecord(target, "interrupted").encode())
    age(made, LATER_S)
    outcomes = set()
    for num_first in range(20):
        for num_second in range(20):
            store = copy_of(made)
            with (
                Actor(store, lambda store: drop(Catalog(store), target)) as dropper,
                Actor(store, pinning(target)) as pinner,
            ):
                dropper.go_on(num_first)
                pinner.go_on(num_second)
                dropper.go()
                pinner.go()
            outcomes.add(check(store, pinner))
    assert outcomes == {True, False}


def dropped_by_name(store: Store, target: SaveId) -> None:
    drop(Catalog(store), target)


def dropped_by_the_job(store: Store, target: SaveId) -> None:
    drop_unkept(Catalog(store), KEEP, target.generation, ())


@pytest.mark.parametrize("dropped", [dropped_by_name, dropped_by_the_job])
def test_a_pin_beside_a_drop_while_a_record_becomes_stale(
    made: MemoryStore, dropped: Callable[[Store, SaveId], None]
) -> None:
    """Whoever drops the step finds a young record that he has not put, whoever pins it finds the same one stale."""
    target = target_of(made)
    made.put(target.trash_key, TrashRecord(target, "interrupted").encode())
    age(made, Catalog(made).root().save_deadline_s - 1)
    for num_first in range(24):
        store = copy_of(made)
        with (
            Actor(store, lambda store: dropped(store, target)) as dropper,
            Actor(store, pinning(target)) as pinner,
        ):
            dropper.go_on(num_first)
            age(store, 2)
            pinner.go()
            dropper.go()
        assert dropper.error is None
        check(store, pinner)


def test_a_pin_while_everybody_sweeps_for_days(made: MemoryStore) -> None:
    """Whoever pins was stopped meanwhile, so no trash record tells of the step any more."""
    for num_pinned in range(12):
        store = copy_of(made)
        with Actor(store, pinning(target_of(store))) as pinner:
            pinner.go_on(num_pinned)
            after_all(store)
            pinner.go()
        check(store, pinner)


def test_a_sweep_that_spares_a_step_hides_no_other_that_does_not(made: MemoryStore) -> None:
    """Two sweeps drop the step. One has looked for pins before there was one, the other one does so after."""
    target = target_of(made)
    with (
        Actor(made, swept) as late,
        Actor(made, swept) as blind,
        Actor(made, pinning(target)) as pinner,
    ):
        late.go(lambda operation: operation == ("put", target.trash_key))
        blind.go(lambda operation: operation == ("delete", target.manifest_key))
        pinner.go(lambda operation: operation[0] == "put")
        pinner.go_on(1)
        late.go()
        pinner.go()
        blind.go()
    assert isinstance(pinner.error, StoreError)
    assert not check(made, pinner)


# -- a real bucket


def test_pins_and_promises_in_a_bucket(s3: ObjectStorage) -> None:
    with open_store(s3.url(), s3.options()) as store:
        catalog = make_root(store, save_deadline_s=0.0)
        generation = make_generation(catalog)
        for step in range(6):
            metrics = {"loss": abs(step - 1.0)}
            make_save(catalog, generation, step, state(step), metrics=metrics, exempt=step == 2)
        keep = Keep(last=1, grace=timedelta(0), best="loss", mode="min")
        saves = catalog.saves()
        pin(catalog, saves[3])
        assert [save.step for save in sweep(catalog, keep, generation).dropped] == [0, 4]
        assert listed_steps_are_whole(store) == [1, 2, 3, 5]
        unpin(catalog, saves[3])
        assert [save.step for save in sweep(Catalog(store), keep, generation).dropped] == [3]
        assert listed_steps_are_whole(store) == [1, 2, 5]
        with pytest.raises(CheckpointNotFound):
            pin(catalog, saves[3])


@pytest.mark.parametrize("how_long", [0.4, 0.6])
def test_a_sweep_that_was_suspended_drops_nothing(
    store: Store, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, how_long: float
) -> None:
    """Whoever pinned a step meanwhile found its trash record too old to be a living sweep's."""
    saves = make_steps(catalog)
    wall, put, slept = time.time, type(store).put, 0.0
    monkeypatch.setattr(time, "time", lambda: wall() + slept)

    def put_and_sleep(self: Store, key: str, *data: Any, **more: Any) -> None:
        nonlocal slept
        put(self, key, *data, **more)
        if key == saves[0].trash_key:
            slept = how_long * catalog.root().save_deadline_s

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "put", put_and_sleep)
        dropped = sweep(catalog, KEEP, None).dropped
    assert len(dropped) == (3 if how_long < 0.5 else 0)
    assert len(catalog.saves()) == (1 if how_long < 0.5 else 4)
    age(store, STALE_S)
    for _ in range(2):  # it drops the records, which are stale, and then the steps
        sweep(catalog, KEEP, None)
    assert listed_steps_are_whole(store) == [3]


def test_a_live_job_that_was_suspended_as_it_looked_for_a_newer_one_drops_nothing(
    store: Store, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last thing that it asks the store."""
    saves = make_steps(catalog)
    wall, scan, slept = time.time, type(store).scan, 0.0
    monkeypatch.setattr(time, "time", lambda: wall() + slept)

    def scan_and_sleep(self: Store, prefix: str, after: str = "") -> list[Entry]:
        nonlocal slept
        found = scan(self, prefix, after)
        if prefix == keys.GENERATIONS and scan(self, saves[0].trash_key):
            slept = 0.6 * catalog.root().save_deadline_s
        return found

    with monkeypatch.context() as patched:
        patched.setattr(type(store), "scan", scan_and_sleep)
        assert sweep(catalog, KEEP, saves[0].generation).dropped == ()
    assert slept
    assert catalog.saves() == saves


@pytest.mark.parametrize("listing", [1, 2], ids=["what_there_is", "what_goes"])
def test_a_sweep_that_was_suspended_deletes_no_record_that_was_put_meanwhile(
    made: MemoryStore, monkeypatch: pytest.MonkeyPatch, listing: int
) -> None:
    """It listed a stale one, and deletes by name. The new one is of a sweep that is about to delete the manifest.

    `listing`: of trash records, the one behind which it is suspended.
    """
    target = target_of(made)
    made.put(target.trash_key, TrashRecord(target, "interrupted").encode())
    age(made, STALE_S)
    wall, slept, num_listed = time.time, 0.0, 0
    monkeypatch.setattr(time, "time", lambda: wall() + slept)
    suspended = ActorStore(made)
    scan = suspended.scan
    with Actor(made, swept) as blind, Actor(made, pinning(target)) as pinner:

        def scan_and_sleep(prefix: str, after: str = "") -> list[Entry]:
            nonlocal slept, num_listed
            found = scan(prefix, after)
            num_listed += prefix == keys.TRASH
            if num_listed == listing and not slept:
                slept = 0.6 * Catalog(made).root().save_deadline_s
                blind.go(lambda operation: operation == ("delete", target.manifest_key))
            return found

        monkeypatch.setattr(suspended, "scan", scan_and_sleep)
        sweep(Catalog(suspended), Keep(last=9), None)
        pinner.go()
        blind.go()
    assert slept
    assert not check(made, pinner)
