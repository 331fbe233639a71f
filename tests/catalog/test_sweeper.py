"""A live job's sweeps: what they cost, that they drop what a whole sweep drops, and that bytes go in the end."""

from __future__ import annotations

import random
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.inside import objects_of
from support import age, all_keys, keys_of, listed_steps_are_whole, make_generation, make_root, make_save, state
from typing_extensions import override

from benchmarks.counting import CountingStore, Requests
from ckptlib.catalog import sweeper
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.pins import pin, unpin
from ckptlib.catalog.retention import sweep
from ckptlib.catalog.sweeper import LOOKS, ROOMS, Sweeper
from ckptlib.errors import StoreDenied, StoreError, StoreFull, StoreTimeout, Superseded
from ckptlib.format.keys import SaveId
from ckptlib.policy.keep import EARLY_S, Keep
from ckptlib.stores.memory import MemoryStore

GRACE_S = 3600.0
GRACE = timedelta(seconds=GRACE_S)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The monotonic clock, which stands until somebody moves it."""
    found = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(sweeper, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def copy_of(store: MemoryStore) -> MemoryStore:
    found = MemoryStore()
    objects_of(found).update(objects_of(store))
    return found


@pytest.mark.parametrize(("num_ranks", "num_dropped"), [(1, 2), (7, 2), (1, 40), (7, 40)])
def test_it_costs_the_same_whatever_the_number_of_ranks_and_of_dropped_steps(
    clock: SimpleNamespace, num_ranks: int, num_dropped: int
) -> None:
    store = CountingStore(MemoryStore())
    catalog = make_root(store)
    generation = make_generation(catalog, world_size=num_ranks)
    live = Sweeper(Catalog(store), Keep(2, grace=GRACE))
    for step in range(num_dropped + 2):
        live.sweep(make_save(catalog, generation, step, state(step), num_ranks))
    save = make_save(catalog, generation, num_dropped + 2, state(num_dropped + 2), num_ranks)
    store.log.clear()
    with store.counted() as found:
        live.sweep(save)
    # new step; record; steps, pins once more, generations for four reasons; the manifest
    assert found == [Requests(put=1, get=1, list=6, delete=1)]
    assert {key.partition("/")[0] for operation, key in store.log if operation == "list"} == {"steps", "generations"}
    assert listed_steps_are_whole(store) == [num_dropped + 1, num_dropped + 2]


def test_where_no_step_is_dropped_it_costs_four_requests(clock: SimpleNamespace) -> None:
    store = CountingStore(MemoryStore())
    catalog = make_root(store)
    generation = make_generation(catalog)
    live = Sweeper(Catalog(store), Keep(10, grace=GRACE))
    live.sweep(make_save(catalog, generation, 1, state(1)))
    save = make_save(catalog, generation, 2, state(2))
    with store.counted() as found:
        live.sweep(save)
    assert found == [Requests(get=1, list=3)]  # new step; generations twice, steps


class Uncleaned(MemoryStore):
    """A bucket whose uploads cannot be listed."""

    def __init__(self, error: StoreError) -> None:
        super().__init__()
        self._error = error

    @override
    def clean(self, *_: object) -> None:
        raise self._error


@pytest.mark.parametrize("kind", [StoreDenied, StoreError], ids=["no right", "a server that knows no such request"])
def test_a_sweep_is_not_repeated_where_uploads_cannot_be_listed(
    clock: SimpleNamespace, caplog: pytest.LogCaptureFixture, kind: type[StoreError]
) -> None:
    store = CountingStore(Uncleaned(kind("cannot list uploads")))
    catalog = make_root(store)
    generation = make_generation(catalog)
    live = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    live.sweep(make_save(catalog, generation, 1, state(1)))
    store.log.clear()
    live.sweep(make_save(catalog, generation, 2, state(2)))
    assert not [key for operation, key in store.log if operation == "list" and key.startswith("packs/")]
    assert listed_steps_are_whole(store) == [2]
    assert caplog.messages == ["what crashed uploads left stays, and is paid for: cannot list uploads"]


def test_a_store_that_is_away_as_uploads_are_listed_is_asked_by_the_next_sweep(clock: SimpleNamespace) -> None:
    store = CountingStore(Uncleaned(StoreTimeout("no answer")))
    catalog = make_root(store)
    generation = make_generation(catalog)
    live = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    for step in (1, 2):
        saved = make_save(catalog, generation, step, state(step))
        store.log.clear()
        with pytest.raises(StoreTimeout, match="no answer"):
            live.sweep(saved)
        assert [key for operation, key in store.log if operation == "list" and key.startswith("packs/")]
    assert listed_steps_are_whole(store) == [2], "all else is done by then"


def test_bytes_go_after_the_grace_period_and_a_part_of_it(clock: SimpleNamespace) -> None:
    store = MemoryStore()
    catalog = make_root(store)
    generation = make_generation(catalog)
    live = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    for step in (1, 2):
        save = make_save(catalog, generation, step, state(step))
        live.sweep(save)
    dropped = SaveId(1, generation)
    assert [entry.key for entry in store.scan("trash/")] == [dropped.trash_key]
    age(store, GRACE_S + 1)
    clock.now += GRACE_S / LOOKS - 1
    live.sweep(save)
    assert keys_of(store, dropped)
    clock.now += 1
    live.sweep(save)
    assert not keys_of(store, dropped)
    assert listed_steps_are_whole(store) == [2]


def test_a_step_that_lacks_objects_is_told_once(clock: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody has deleted them, or the store has lost them: whoever counts on the step would else hear of it at its
    load, when the others are dropped."""
    store = MemoryStore()
    catalog = make_root(store)
    generation = make_generation(catalog)
    hurt, dropped, newest = (make_save(catalog, generation, step, state(step)) for step in (1, 2, 3))
    for save in (hurt, dropped):
        store.delete(*(entry.key for entry in store.scan(f"packs/{save}/")))
    live = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    pin(catalog, hurt)
    for _ in range(3):
        live.sweep(newest)
        clock.now += GRACE_S
    (told,) = caplog.messages
    assert told.startswith("step 1 lacks objects, and can be loaded in part at best")
    assert told.endswith(f"ckptlib verify {store.url} 1")


class Full(MemoryStore):
    """One that takes nothing any more, when `is_full`."""

    is_full = False

    @override
    def put(self, key: str, head: Any, pieces: Any = (), **told: Any) -> None:
        if self.is_full:
            raise StoreFull("no space left, as planned")
        super().put(key, head, pieces, **told)


def test_a_store_that_is_full_gets_room_at_the_next_commit(clock: SimpleNamespace) -> None:
    """A record has no place there; a whole sweep deletes what is due before it puts any."""
    store = Full()
    catalog = make_root(store)
    generation = make_generation(catalog)
    live = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    for step in (1, 2):
        live.sweep(make_save(catalog, generation, step, state(step)))
    age(store, GRACE_S + 1)
    save = make_save(catalog, generation, 3, state(3))
    store.is_full = True
    for left in (True, False):
        with pytest.raises(StoreFull):
            live.sweep(save)
        assert bool([*store.scan(SaveId(1, generation).packs_prefix)]) == left
    assert listed_steps_are_whole(store) == [2, 3]


def test_what_a_crash_left_before_goes_as_well(clock: SimpleNamespace) -> None:
    store = MemoryStore()
    catalog = make_root(store)
    generation = make_generation(catalog)
    live = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    first = make_save(catalog, generation, 1, state(1))
    left = make_save(catalog, make_generation(catalog, 2, first), 2, state(2))
    store.delete(left.manifest_key)
    save = make_save(catalog, make_generation(catalog, 3, first), 3, state(3))
    for _ in range(2):  # it becomes trash, and then goes
        assert keys_of(store, left)
        age(store, GRACE_S + 1)
        live.sweep(save)
        clock.now += GRACE_S / LOOKS
    assert not keys_of(store, left)


def test_a_job_that_is_superseded_drops_nothing(clock: SimpleNamespace) -> None:
    store = MemoryStore()
    catalog = make_root(store)
    generation = make_generation(catalog)
    live = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    live.sweep(make_save(catalog, generation, 1, state(1)))
    save = make_save(catalog, generation, 2, state(2))
    make_generation(catalog, 2, save)
    before = all_keys(store)
    with pytest.raises(Superseded):
        live.sweep(save)
    assert all_keys(store) == before


KEEPS = (
    Keep(1, grace=GRACE),
    Keep(2, every=3, grace=GRACE),
    Keep(1, best="loss", mode="min", num_best=2, grace=GRACE),
    Keep(3, within=timedelta(hours=1), grace=GRACE),
)


@pytest.mark.parametrize("seed", range(24))
def test_it_drops_what_a_whole_sweep_drops(clock: SimpleNamespace, seed: int) -> None:
    """Beside pins, exempt steps, steps that lack objects, restarts and rewinds: each state is given to both."""
    chance = random.Random(seed)
    store, keep = MemoryStore(), KEEPS[seed % len(KEEPS)]
    catalog = make_root(store)
    generation = make_generation(catalog)
    live, step, number = Sweeper(Catalog(store), keep), 0, 1
    dropped = 0
    for _ in range(30):
        step += 1
        told = {"metrics": {"loss": chance.random()}, "exempt": chance.random() < 0.1, "created": 600.0 * step}
        age(store, 600)
        save = make_save(catalog, generation, step, state(step), **told)
        whole = copy_of(store)
        dropped += len(sweep(Catalog(whole), keep, generation).dropped)
        live.sweep(save)
        assert Catalog(store).saves() == Catalog(whole).saves()
        left = Catalog(store).saves()
        event = chance.random()
        if event < 0.2:
            pin(Catalog(store), chance.choice(left))
        elif event < 0.3:
            unpin(Catalog(store), chance.choice(left))
        elif event < 0.4:  # the job starts again, or goes back
            origin = chance.choice(left)
            number, step = number + 1, origin.step
            generation = make_generation(catalog, number, origin)
            live = Sweeper(Catalog(store), keep)
        elif event < 0.5:  # somebody deletes a pack; a job that starts again sees it
            store.delete(*(pack.key for pack in store.scan(chance.choice(left).packs_prefix)))
            live = Sweeper(Catalog(store), keep)
    assert dropped > 5


def dropped_after(clock: SimpleNamespace, seconds: float) -> tuple[MemoryStore, Sweeper, SaveId, SaveId]:
    """A job that has gone on for EARLY_S, and dropped a step so many seconds ago; the one that it keeps."""
    store = MemoryStore()
    catalog = make_root(store)
    generation = make_generation(catalog)
    live = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    dropped = make_save(catalog, generation, 1, state(1))
    kept = make_save(catalog, generation, 2, state(2))
    live.sweep(kept)
    clock.now += EARLY_S
    age(store, seconds)
    return store, live, dropped, kept


@pytest.mark.parametrize("in_flight_s", [0.0, 500.0])
def test_a_full_store_gets_room_when_a_step_was_dropped_long_enough_ago(
    clock: SimpleNamespace, in_flight_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    for seconds, goes in ((EARLY_S + in_flight_s - 2, False), (EARLY_S + in_flight_s + 2, True)):
        store, live, dropped, kept = dropped_after(clock, seconds)
        live.make_room(kept, in_flight_s)
        assert bool(keys_of(store, dropped)) != goes
        assert listed_steps_are_whole(store) == [2]
    assert "nearly full: what was dropped goes after 300 s instead of 1:00:00" in caplog.text


@pytest.mark.parametrize("lost", [False, True])
def test_no_room_is_made_where_a_job_of_before_may_be_about_to_commit(clock: SimpleNamespace, lost: bool) -> None:
    """It may be for as long after the record of this one, however long this one has run by then. `lost`: of that record
    the copy alone is there."""
    store, _, dropped, before = dropped_after(clock, 2 * EARLY_S)
    later = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    clock.now += 10 * EARLY_S
    catalog = Catalog(store)
    kept = make_save(catalog, make_generation(catalog, 2, resumed_from=before), 3, state(3))
    if lost:
        store.delete(kept.generation.key)
    later.make_room(kept, 0.0)
    assert keys_of(store, dropped)
    clock.now += EARLY_S
    age(store, EARLY_S + 2)
    later.make_room(kept, 0.0)
    assert not keys_of(store, dropped)


def test_room_is_made_where_a_full_store_tells_no_time(clock: SimpleNamespace) -> None:
    """The newest object is the record of the job itself, or one that came at once behind it."""
    store = Full()
    catalog = make_root(store)
    generation = make_generation(catalog)
    dropped = make_save(catalog, generation, 1, state(1))
    before = make_save(catalog, generation, 2, state(2))
    Sweeper(Catalog(store), Keep(1, grace=GRACE)).sweep(before)
    age(store, 2 * EARLY_S)
    decided = SaveId(3, make_generation(catalog, 2, resumed_from=before))
    live, store.is_full = Sweeper(Catalog(store), Keep(1, grace=GRACE)), True
    live.make_room(decided, 0.0)
    clock.now += EARLY_S - 1
    live.make_room(decided, 0.0)
    assert keys_of(store, dropped)
    clock.now += EARLY_S / ROOMS
    live.make_room(decided, 0.0)
    assert not keys_of(store, dropped)


def test_a_store_that_stays_full_is_looked_through_now_and_then(clock: SimpleNamespace) -> None:
    store = CountingStore(MemoryStore())
    catalog = make_root(store)
    kept = make_save(catalog, make_generation(catalog), 1, state(1))
    live = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    clock.now += EARLY_S
    looks = 0
    for _ in range(100):
        with store.counted() as found:
            live.make_room(kept, 0.0)
        looks += bool(found[0].list)
        clock.now += EARLY_S / 100
    assert looks == 10


def test_nothing_goes_early_where_the_grace_period_is_shorter(clock: SimpleNamespace) -> None:
    store, _, dropped, kept = dropped_after(clock, 121.0)
    sweep(Catalog(store), Keep(1, grace=timedelta(seconds=120)), kept.generation, early_s=EARLY_S)
    assert not keys_of(store, dropped), "its time has come"


class Lost(MemoryStore):
    """One that loses the next deletion of manifests, when `loses`."""

    loses = False

    @override
    def delete(self, *keys: str) -> None:
        if self.loses and any(key.startswith("steps/") for key in keys):
            self.loses = False
            raise StoreError("the connection was lost")
        super().delete(*keys)


def test_a_step_whose_drop_failed_is_dropped_later_and_has_its_time_then(clock: SimpleNamespace) -> None:
    """It was listed, and could be looked up to be read, however old its record was."""
    store = Lost()
    catalog = make_root(store, save_deadline_s=GRACE_S / 2)
    generation = make_generation(catalog)
    live = Sweeper(Catalog(store), Keep(1, grace=GRACE))
    clock.now += EARLY_S
    dropped = make_save(catalog, generation, 1, state(1))
    live.sweep(dropped)
    kept = make_save(catalog, generation, 2, state(2))
    store.loses = True
    with pytest.raises(StoreError, match="lost"):
        live.sweep(kept)
    age(store, 2 * EARLY_S)
    live.sweep(kept)
    live.make_room(kept, 0.0)
    assert listed_steps_are_whole(store) == [1, 2]
    age(store, GRACE_S / 2)
    live.sweep(kept)
    assert listed_steps_are_whole(store) == [2]
    for seconds, is_there in ((0.0, True), (EARLY_S + 2, False)):
        age(store, seconds)
        clock.now += EARLY_S / ROOMS
        live.make_room(kept, 0.0)
        assert bool(keys_of(store, dropped)) == is_there
