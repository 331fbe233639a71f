"""What an object store is asked: so many requests, and none that grow with what they need not grow with."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
from support import age, layout_of, make_generation, make_root, make_save, put_part, put_parts, state
from typing_extensions import override

import ckptlib
from benchmarks.counting import CountingStore, Requests
from ckptlib.catalog import commit, retention
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.pauses import Pauses
from ckptlib.catalog.reading import each, in_order, warm
from ckptlib.catalog.retention import sweep
from ckptlib.errors import CorruptData, SaveFailed, StoreError, Superseded
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.policy.keep import Keep
from ckptlib.stores.io_limits import DOCUMENT_THREADS
from ckptlib.stores.memory import MemoryStore

PATIENCE_S = 150.0
GRACE = timedelta(hours=1)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore(MemoryStore())


@pytest.fixture
def catalog(store: CountingStore) -> Catalog:
    return make_root(store)


def left() -> float:
    return PATIENCE_S


def copies(store: CountingStore, save: SaveId, steps: range) -> list[SaveId]:
    """Committed steps with the manifest of one, and nothing else of their own."""
    manifest = Catalog(store).manifest(save)
    found = [SaveId(step, save.generation) for step in steps]
    for other in found:
        parts = tuple(replace(name, save=other) for name in manifest.parts)
        store.put(other.manifest_key, replace(manifest, save=other, parts=parts).encode())
    return found


@pytest.mark.parametrize("num_ranks", [1, 3, 20])
def test_a_commit_costs_eight_requests_whatever_the_number_of_ranks(
    store: CountingStore, catalog: Catalog, num_ranks: int
) -> None:
    generation, committer = make_generation(catalog), Committer(Catalog(store))
    save, _ = put_parts(catalog, generation, 1, state(1), num_ranks)
    with store.counted() as first:
        committer.commit_when_whole(save, num_ranks, left)
    # The layout and all parts are read; the layout, and the root's document, are put a second time.
    assert first == [Requests(put=1 + 2, get=1 + num_ranks + 1 + 1 + 2, list=3 + 1)]
    for step in (2, 3):
        save, _ = put_parts(catalog, generation, step, state(step), num_ranks)
        with store.counted() as steady:
            committer.commit_when_whole(save, num_ranks, left)
        assert steady == [Requests(put=1, get=2 + 2, list=3)]
    with store.counted() as known:
        assert Catalog(store).is_committed(save)
        assert not Catalog(store).is_committed(SaveId(9, generation))
    assert known == [Requests(get=2)]


def test_a_job_that_goes_on_lists_no_parts_of_earlier_steps() -> None:
    """Those of dropped ones stay for a day: with a thousand ranks there are hundreds of thousands."""

    def asked(num_earlier: int) -> Requests:
        store = CountingStore(MemoryStore())
        catalog = make_root(store)
        generation = make_generation(catalog)
        _, names = put_parts(catalog, generation, 1, state(1))
        for number in range(num_earlier):
            store.put(replace(names[0], save=SaveId(2 + number // 1000, generation), rank=number).key, b"")
        make_save(catalog, generation, 1000, state(2))
        whole, _ = put_parts(catalog, generation, 1001, state(3))
        with store.counted() as found:
            assert finish_saves(Catalog(store), catalog.next_generation(), to_go_on=True) == [whole]
        return found[0]

    assert asked(0) == asked(2500)


def test_a_commit_costs_the_same_whatever_the_number_of_layouts(store: CountingStore, catalog: Catalog) -> None:
    """A state that changes at every save has another one at each."""
    generation, committer = make_generation(catalog), Committer(Catalog(store))
    found: list[Requests] = []
    for step in range(1, 4):
        for same in (0, 1):  # as a new layout and as one that is known
            save, _ = put_parts(catalog, generation, 2 * step + same, {**state(1), f"x{step}": np.zeros(2)}, 2)
            with store.counted() as commit:
                committer.commit_when_whole(save, 2, left)
            found += commit
        for number in range(1200 * step, 1200 * (step + 1)):
            for key in (keys.layout_key(f"{number:032x}"), keys.copy_key(keys.layout_key(f"{number:032x}"))):
                store.put(key, b"")
    assert found[2:4] == found[4:6]
    assert found[0].list == found[4].list == found[1].list + 1 == 3 + 1


def test_is_committed_tells_of_a_manifest_that_nobody_can_read(store: CountingStore, catalog: Catalog) -> None:
    save = SaveId(4, make_generation(catalog))
    store.put(save.manifest_key, b"")
    assert catalog.is_committed(save)


class Clock:
    """One that moves when somebody sleeps; at a time something happens."""

    def __init__(self, at_s: float, happens: Callable[[], object]) -> None:
        self.now, self.at_s, self.happens = 0.0, at_s, happens

    def sleep(self, seconds: float) -> None:
        before, self.now = self.now, self.now + seconds
        if before < self.at_s <= self.now:
            self.happens()


@pytest.mark.parametrize(
    ("usual_s", "late_s", "polls"), [(30.0, 30.0, 6), (30.0, 60.0, 10), (1.0, 1.0, 6), (600.0, 600.0, 6)]
)
def test_others_are_waited_for_by_few_listings(
    store: CountingStore,
    catalog: Catalog,
    monkeypatch: pytest.MonkeyPatch,
    usual_s: float,
    late_s: float,
    polls: int,
) -> None:
    """Within a fourth of what a save takes anyway."""
    generation = make_generation(catalog)
    save, layout = SaveId(1, generation), layout_of(state(1), 2)
    put_part(catalog, save, 0, layout, state(1))
    clock = Clock(late_s, lambda: put_part(catalog, save, 1, layout, state(1)))
    monkeypatch.setattr(commit, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    Committer(Catalog(store)).commit_when_whole(save, 2, lambda: 3600 - clock.now, usual_s)
    assert sum(call == ("list", save.parts_prefix) for call in store.log) <= polls
    assert late_s <= clock.now <= late_s + usual_s / 4 + 2


def test_a_committer_that_waits_for_long_hears_that_its_job_is_superseded(
    store: CountingStore, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, layout = SaveId(1, make_generation(catalog)), layout_of(state(1), 2)
    put_part(catalog, save, 0, layout, state(1))
    clock = Clock(5.0, lambda: make_generation(catalog, 2))
    monkeypatch.setattr(commit, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    with pytest.raises(Superseded):
        Committer(Catalog(store)).commit_when_whole(save, 2, lambda: 3600 - clock.now)
    assert clock.now < 30


def test_pauses_end_at_the_deadline(store: CountingStore, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    save = SaveId(1, make_generation(catalog))
    clock = Clock(0.0, lambda: None)
    monkeypatch.setattr(commit, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep))
    with pytest.raises(SaveFailed, match="no part came from 2 of 2 ranks"):
        Committer(Catalog(store)).commit_when_whole(save, 2, lambda: 100 - clock.now, 1000.0)
    assert clock.now == 100


def test_a_local_disk_is_asked_at_once() -> None:
    local, remote = MemoryStore(), MemoryStore()
    local.is_local = True
    assert [Pauses(local, 1000.0).next(), Pauses(remote).next()] == [0.005, 0.05]
    pauses = Pauses(local, 1000.0)
    assert max(pauses.next() for _ in range(50)) == 0.5
    pauses = Pauses(remote)
    assert max(pauses.next() for _ in range(50)) == 2.0


def test_latest_is_one_page_for_each_thousand_steps(store: CountingStore, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    newest = copies(store, make_save(catalog, generation, 1, state(1)), range(2, 2502))[-1]
    for number in range(2, 6):
        make_generation(catalog, number, newest)
    reader = Catalog(store)
    with store.counted() as first:
        assert reader.resolve("latest") == newest
    assert first == [Requests(get=5, list=3 + 1)]  # the generation that saved it, and those that were put since
    with store.counted() as again:
        assert reader.resolve("latest") == newest
    assert again == [Requests(list=3 + 1)]


def test_latest_is_three_requests_whatever_the_number_of_restarts(store: CountingStore, catalog: Catalog) -> None:
    save = None
    for number in range(1, 21):
        save = make_save(catalog, make_generation(catalog, number, save), number, state(number))
        with store.counted() as found:
            assert Catalog(store).resolve("latest") == save
        assert found == [Requests(get=1, list=2)]
    with store.counted() as found:
        assert Catalog(store).resolve(20) == save
    assert found == [Requests(get=1 + 20, list=2)]  # which of several saves of a step: all of history says


def test_a_sweep_that_drops_a_step(store: CountingStore, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    keep, live = Keep(2, grace=GRACE), Catalog(store)
    for step in range(1, 4):
        make_save(catalog, generation, step, state(step))
    sweep(live, keep, generation)
    make_save(catalog, generation, 4, state(4))
    with store.counted() as found:
        assert [save.step for save in sweep(live, keep, generation).dropped] == [2]
    # root, new step, record; clock, record; clock, five rooms, pins once more, generations for four reasons
    assert found == [Requests(put=2, get=3, list=11, delete=2)]


def make_trash(store: CountingStore, catalog: Catalog, steps: range) -> GenerationId:
    """Steps that were dropped so long ago that all of them may go, and one that stays."""
    generation = make_generation(catalog)
    for step in (*steps, steps.stop):
        make_save(catalog, generation, step, state(step), 2)
    dropped = sweep(Catalog(store), Keep(1, grace=GRACE), generation).dropped
    assert [save.step for save in dropped] == [*steps]
    age(store._inner, 2 * GRACE.total_seconds())
    return generation


def test_deletions_are_batches_of_one_stage_each(
    store: CountingStore, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = make_trash(store, catalog, range(1, 8))
    monkeypatch.setattr(retention, "BATCH", 5)
    calls: list[tuple[str, ...]] = []
    inner = store.delete
    monkeypatch.setattr(store, "delete", lambda *keys: [calls.append(keys), inner(*keys)])
    sweep(Catalog(store), Keep(1, grace=GRACE), generation)
    stages = [{key.partition("/")[0] for key in keys} for keys in calls]
    assert stages == [{"trash"}, *[{"parts"}] * 3, *[{"packs"}] * 3, *[{"trash"}] * 2]  # the clock's comes first
    assert [len(keys) for keys in calls[1:]] == [5, 5, 4, 5, 5, 4, 5, 2]
    assert all(save.step == 8 for save in Catalog(store).saves())


class HalfDone(CountingStore):
    """One whose deletions, from the nth on, do every other object and fail."""

    left = 1 << 30

    @override
    def delete(self, *keys: str) -> None:
        self.left -= 1
        if self.left < 0:
            self._inner.delete(*keys[::2])
            raise StoreError("the connection was lost")
        super().delete(*keys)


@pytest.mark.parametrize("nth", range(5))
def test_a_batch_that_was_half_done_costs_nobody_anything(nth: int) -> None:
    """A crash in any deletion: steps that stay are whole, what was dropped stays so, and the next sweep ends it."""
    store = HalfDone(MemoryStore())
    catalog = make_root(store)
    generation = make_trash(store, catalog, range(1, 8))
    make_save(catalog, generation, 9, state(9), 2)
    make_save(catalog, generation, 10, state(10), 2)
    store.left = nth
    with pytest.raises(StoreError, match="the connection was lost"):
        sweep(Catalog(store), Keep(2, grace=GRACE), generation)
    listed = Catalog(store).saves()
    assert {save.step for save in listed} in ({9, 10}, {8, 9, 10})
    for save in listed[-2:]:
        manifest = Catalog(store).manifest(save)
        for name in manifest.parts:
            assert all(store.get(pack.key) for pack in Catalog(store).part(name).packs)
    for save in (SaveId(step, generation) for step in range(1, 8)):
        if any(True for _ in [*store.scan(save.parts_prefix), *store.scan(save.packs_prefix)]):
            assert [entry.key for entry in store.scan(save.trash_key)], "without it, its parts would be committed"
    store.left = 1 << 30
    for _ in range(3):
        age(store._inner, 2 * GRACE.total_seconds())
        sweep(Catalog(store), Keep(2, grace=GRACE), generation)
    assert {entry.key.split("/")[1][:12] for entry in store.scan("packs/")} == {f"{step:012d}" for step in (9, 10)}
    assert [entry.key for entry in store.scan("trash/")] == []


class Crowd(CountingStore):
    """One that answers some reads only when as many are under way as there are threads for documents."""

    def expect(self, prefix: str, number: int) -> None:
        """The next reads of keys with this prefix, so many."""
        self._prefix, self._number = prefix, number
        self._barrier = threading.Barrier(DOCUMENT_THREADS)

    _prefix, _number = "", 0

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        if self._number and key.startswith(self._prefix):
            with self._lock:
                self._number -= 1
            self._barrier.wait(PATIENCE_S)
        return super().get(key, offset, nbytes)


NUM = 2 * DOCUMENT_THREADS


@pytest.fixture
def crowd() -> Crowd:
    store = Crowd(MemoryStore())
    make_root(store)
    return store


def test_manifests_of_all_steps_are_read_at_once(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    save = make_save(Catalog(crowd), make_generation(Catalog(crowd)), 1, state(1))
    saves = [save, *copies(crowd, save, range(2, NUM + 1))]
    monkeypatch.setattr("ckptlib.api.open_store", lambda url, options: crowd)
    crowd.expect("steps/", NUM)
    assert [info.step for info in ckptlib.checkpoints("here")] == [save.step for save in saves]
    crowd.expect("steps/", NUM)
    catalog = Catalog(crowd)
    sweep(catalog, Keep(NUM, grace=GRACE), save.generation)
    with crowd.counted() as known:
        catalog.warm_stands(saves)
    assert known == [Requests()]


def test_records_of_all_generations_are_read_at_once(crowd: Crowd) -> None:
    for number in range(1, NUM + 1):
        make_generation(Catalog(crowd), number)
    crowd.expect("generations/", NUM)
    Catalog(crowd).generations.check_versions()


def test_the_parts_of_a_first_commit_are_read_at_once(crowd: Crowd) -> None:
    catalog = Catalog(crowd)
    save, names = put_parts(catalog, make_generation(catalog), 1, state(1), NUM)
    crowd.expect("parts/", NUM)
    assert Committer(Catalog(crowd)).commit(save, names).world_size == NUM


def test_behind_an_error_nothing_is_begun() -> None:
    """Each may take a minute to fail, where a store does not answer; so may each after Ctrl-C."""
    begun: list[int] = []
    goes_on = threading.Event()

    def call(item: int) -> None:
        begun.append(item)
        if item == 0:
            raise CorruptData("item 0")
        goes_on.wait()

    with ThreadPoolExecutor(1) as executor:
        with pytest.raises(CorruptData, match="item 0"):
            [*in_order(executor, call, range(9), ahead=9)]
        goes_on.set()
    assert begun in ([0], [0, 1])


def test_errors_of_many_reads_are_those_of_the_first() -> None:
    def call(item: int) -> int:
        if item in (3, 5):
            raise CorruptData(f"item {item}")
        return item

    with pytest.raises(CorruptData, match="item 3"):
        [*each(call, range(100))]
    warm(call, range(10))
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    with ThreadPoolExecutor(2) as executor:
        results = in_order(executor, lambda item: item * 2, items(), ahead=10)
        assert [next(results), next(results)] == [0, 2]
        assert len(taken) <= 12
