"""Writers without trainers and without a successor: what all ranks held in memory becomes a step of the store."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.actors import ActorStore
from support import ROOT_ID, layout_of, make_generation, make_root, make_save, read_save, shards_of

from ckptlib.catalog import commit as commit_module
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.retention import drop
from ckptlib.errors import ReplicasDiffer, SaveFailed, StoreError, StoreFull, StoreTimeout, Superseded
from ckptlib.format import body_layout
from ckptlib.format.check import Check, check_of, compared
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.documents import encode
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import TrashRecord
from ckptlib.pages import PAGE_BYTES
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.stores import Store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import FaultStore, write_plan
from ckptlib.writer import process
from ckptlib.writer import rescue as module
from ckptlib.writer.persist import Persister, put_failure
from ckptlib.writer.process import WriterProcess
from ckptlib.writer.rescue import left_of, rescue

RANKS = 2

DEADLINE_S = 3600.0


class Clock:
    """Each writer has its own, which only its sleeps move on; all writers that rescue sleep as often as each other.

    So a writer that stands still is waited for, as one is whose work takes a small part of the time-out.
    """

    def __init__(self) -> None:
        self._own = threading.local()
        self._meet = threading.Barrier(1)

    def begin(self, num_writers: int) -> None:
        self._meet = threading.Barrier(num_writers, timeout=150)

    def end(self) -> None:
        """Of a writer that is done: the others wait for it no more."""
        self._meet.abort()

    def monotonic(self) -> float:
        return float(getattr(self._own, "now", 0.0))

    def sleep(self, seconds: float) -> None:
        self._own.now = self.monotonic() + seconds
        with contextlib.suppress(threading.BrokenBarrierError):
            self._meet.wait()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    monkeypatch.setattr(module, "COMMIT_TIMEOUT_S", 0.0)  # whoever commits has put all that it waits for
    return clock


def tensors(step: int) -> dict[str, np.ndarray]:
    return {"w": np.arange(6000, dtype=np.float32) * step, "b": np.full(7, step, dtype=np.int64)}


def slot_of(
    directory: Path,
    save: SaveId,
    rank: int,
    number: int,
    arrays: Mapping[str, np.ndarray],
    check: Check | None = None,
) -> Slot:
    """One rank's share of a snapshot, ready."""
    layout = layout_of(arrays, RANKS)
    table = body_layout.lay_out(layout, shards_of(layout, rank))
    nbytes = body_layout.body_nbytes(table)
    slot = Slot.create(directory, f"ckptlib-{ROOT_ID[:16]}-{save.generation}", nbytes + (1 << 20))
    body, digests = slot.body, []
    for tensor, box, begin in zip(table.tensors, table.boxes, table.begins(table.sizes(layout)), strict=True):
        raw = np.ascontiguousarray(arrays[layout.tensors[tensor].name][box.slices()]).tobytes()
        body[begin : begin + len(raw)] = raw
    digest = digester(XXH3)
    digests = [digest(body[o : o + n]) for o, n in zip(table.offsets, table.nbytes, strict=True)]
    fields = {"created": time.time(), "algorithm": XXH3, "digests": "".join(digests), "metrics": {}, "values": {}}
    documents = {"layout": layout.encoded, "table": table.encoded.encode(), "snapshot": encode("snapshot", fields)}
    places = slot.write_documents(nbytes, documents)
    check = compared(number) if check is None else check
    slot.write_header(SlotHeader(ROOT_ID, save, rank, RANKS, number, 2, nbytes, places, check))
    slot.unlock()
    return slot


class Job:
    """A root, and the slots on the hosts of two ranks, each of which holds replicas of the other."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.directory, self._clock = directory, clock
        self.catalog = Catalog(LocalStore(str(directory / "root")))
        make_root(self.catalog.store)
        self.generation = make_generation(self.catalog)
        self.hosts = {rank: list[Slot]() for rank in range(RANKS)}
        self.stores: dict[int, Store] = {}
        """Where it is not the root's."""
        self.deadline = time.monotonic() + DEADLINE_S
        self.committers: dict[int, Committer] = {}
        """Of writers that try more than once."""
        self.ended = 0.0
        """When the writer that was the last one was done."""

    def snapshot(self, step: int) -> SaveId:
        save = SaveId(step, self.generation)
        for host, slots in self.hosts.items():
            directory = self.directory / f"host{host}"
            directory.mkdir(exist_ok=True)
            slots += [slot_of(directory, save, rank, step, tensors(step)) for rank in range(RANKS)]
        return save

    def begun(self, step: int, rank: int) -> SaveId:
        """A save that was under way: the share of this rank alone is on its own host, and in the store."""
        save = SaveId(step, self.generation)
        self.hosts[rank].append(slot_of(self.directory / f"host{rank}", save, rank, step, tensors(step)))
        store = LocalStore(str(self.directory / "root"))
        with ThreadPoolExecutor(1) as executor:
            Persister(store, executor, rank, RANKS, 1e9).persist(self.hosts[rank][-1], save)
        return save

    def rescue(self, known: Mapping[int, SaveId]) -> list[Exception | None]:
        """By the writers of these ranks, each with what its trainer knew; what they raised."""

        def run(rank: int) -> Exception | None:
            store = self.stores.get(rank) or LocalStore(str(self.directory / "root"))
            try:
                with ThreadPoolExecutor(1) as executor:
                    persister = Persister(store, executor, rank, RANKS, 1e9)
                    committer = self.committers.get(rank) or Committer(Catalog(store))
                    rescue(self.hosts[rank], known[rank], rank, persister, committer, self.deadline)
            except Exception as error:
                return error
            finally:
                self.ended = self._clock.monotonic()
                self._clock.end()
            return None

        self._clock.begin(len(known))
        with ThreadPoolExecutor(RANKS) as executor:
            return list(executor.map(run, sorted(known)))

    def check(self, save: SaveId) -> None:
        found = read_save(self.catalog.store, save)
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in tensors(save.step).items()
        }


@pytest.fixture
def job(tmp_path: Path, clock: Clock) -> Job:
    return Job(tmp_path, clock)


@pytest.mark.parametrize("writers", [(0, 1), (0,), (1,)], ids=str)
def test_what_all_ranks_held_is_committed_whichever_writers_are_left(job: Job, writers: tuple[int, ...]) -> None:
    save = job.snapshot(15)
    assert job.rescue(dict.fromkeys(writers, save)) == [None] * len(writers)
    assert job.catalog.visible() == [save]
    job.check(save)


def test_the_newest_that_any_rank_knew_of_counts(job: Job) -> None:
    older, newer = job.snapshot(15), job.snapshot(16)
    assert job.rescue({0: newer, 1: older}) == [None, None]
    assert max(job.catalog.visible()) == newer
    job.check(newer)


@pytest.mark.parametrize("writers", [(0, 1), (0,), (1,)], ids=str)
@pytest.mark.parametrize("by", range(RANKS))
@pytest.mark.parametrize("told", [False, True], ids=["untold", "told"])
def test_a_save_that_was_under_way_is_not_taken_for_what_all_held(
    job: Job, by: int, told: bool, writers: tuple[int, ...]
) -> None:
    """One rank's share of it is in the store. The other's host is lost, or its trainer died first."""
    save = job.snapshot(15)
    newer = job.begun(16, by)
    if told:
        put_failure(job.catalog.store, newer, 1 - by, "the trainer died before its snapshot was whole")
    assert job.rescue(dict.fromkeys(writers, save)) == [None] * len(writers)
    assert job.catalog.visible() == [save]
    job.check(save)
    assert finish_saves(job.catalog, GenerationId(9, "0" * 8)) == []


def test_a_newer_generation_is_left_alone(job: Job) -> None:
    save = job.snapshot(15)
    make_generation(job.catalog, number=2)
    assert [type(error) for error in job.rescue({0: save, 1: save})] == [Superseded, Superseded]
    assert not list(job.catalog.store.scan("parts/"))


@pytest.mark.parametrize(
    "story",
    [[(1, 15)], [(1, 16)], [(1, 15), (2, 15)], [(1, 15), (2, 17)], [(1, 14), (1, 15)], [None, (1, 15)]],
    ids=str,
)
def test_what_the_newest_generation_goes_on_from_is_committed(job: Job, story: list[tuple[int, int] | None]) -> None:
    """It has restored it from memory, and died before it had saved it again; each of these did, or went elsewhere."""
    save, generations = job.snapshot(15), [job.generation]
    for number, origin in enumerate(story, 2):
        resumed = None if origin is None else SaveId(origin[1], generations[origin[0] - 1])
        generations.append(make_generation(job.catalog, number, resumed))
    assert job.rescue({0: save, 1: save}) == [None, None]
    assert job.catalog.visible() == [save]
    job.check(save)


@pytest.mark.parametrize(
    "story", [[(1, 14)], [(1, 15), (2, 14)], [(1, 15), (1, 14)], [(1, 15), None], [(2, 15)]], ids=str
)
def test_what_the_newest_generation_left_behind_is_left_alone(job: Job, story: list[tuple[int, int] | None]) -> None:
    save, generations = job.snapshot(15), [job.generation, GenerationId(2, f"{2:08x}")]
    for number, origin in enumerate(story, 2):
        resumed = None if origin is None else SaveId(origin[1], generations[origin[0] - 1])
        generations[number - 1 :] = [make_generation(job.catalog, number, resumed)]
    assert [type(error) for error in job.rescue({0: save, 1: save})] == [Superseded, Superseded]
    assert not list(job.catalog.store.scan("parts/"))


@pytest.mark.parametrize("step", [15, 18])
def test_what_a_newer_generation_has_saved_again_is_not_put_once_more(job: Job, step: int) -> None:
    save = job.snapshot(15)
    generation = make_generation(job.catalog, 2, save)
    again = make_save(job.catalog, generation, step, tensors(step))
    assert job.rescue({0: save, 1: save}) == [None, None]
    assert job.catalog.visible() == [again]
    assert not list(job.catalog.store.scan(f"parts/{save}"))


@pytest.mark.parametrize("late", [False, True])
def test_a_job_that_goes_on_from_what_all_held_leaves_behind_what_was_under_way(
    job: Job, late: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`late`: it begins while the writers go along with the share that is there."""
    save = job.snapshot(15)
    newer = job.begun(16, 0)

    def begin() -> None:
        if len(job.catalog.generations.ids()) == 1:
            make_generation(job.catalog, 2, save)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.monotonic() > module.SHARES_TIMEOUT_S / 2:
            begin()

    if late:
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=sleep))
    else:
        begin()
    assert job.rescue({0: save, 1: save}) == [None, None]
    assert job.catalog.visible() == [save]
    job.check(save)
    assert not job.catalog.is_committed(newer)


def test_what_a_job_has_restored_counts_where_it_has_removed_what_all_held(job: Job) -> None:
    """The last word of the trainers may not have come, so the writers know of the step before alone."""
    held, newer = job.snapshot(15), job.snapshot(16)
    for slots in job.hosts.values():
        assert left_of(slots, held) == held
        for slot in slots[:RANKS]:
            slot.unlink()
            slot.empty()
    make_generation(job.catalog, 2, newer)
    known = {rank: left_of(slots, held) for rank, slots in job.hosts.items()}
    assert {*known.values()} == {newer}
    assert job.rescue(known) == [None, None]
    assert job.catalog.visible() == [newer]
    job.check(newer)


def test_a_share_that_is_nowhere_is_no_step(job: Job) -> None:
    save = job.snapshot(15)
    for slots in job.hosts.values():
        del slots[1]
    errors = job.rescue({0: save})
    assert isinstance(errors[0], StoreTimeout)
    assert "no part came from 1 of 2 ranks: 1" in str(errors[0])
    assert job.catalog.visible() == []


def test_a_share_that_comes_later_is_committed_at_the_next_try(job: Job) -> None:
    """The store was out of reach of its host for longer than shares are waited for. Neither host holds replicas."""
    save = job.snapshot(15)
    del job.hosts[0][1], job.hosts[1][0]
    assert [type(error) for error in job.rescue({0: save})] == [StoreTimeout]
    assert job.rescue({1: save}) == [None]
    assert job.catalog.visible() == []
    assert job.rescue({0: save}) == [None]
    assert job.catalog.visible() == [save]
    job.check(save)


@pytest.mark.parametrize("swept", [True, False])
def test_what_was_committed_before_an_outage_is_looked_at_by_the_next_try(
    job: Job, tmp_path: Path, swept: bool
) -> None:
    """A sweep may have taken its parts for the remains of a crash: then the slots are all that is left of the step."""
    save, plan = job.snapshot(15), tmp_path / "plan.json"
    write_plan(plan, [{"op": "get", "key": "^trash/", "nth": 2, "action": "error"}])  # the first that is behind it
    job.committers[0] = Committer(Catalog(FaultStore(job.catalog.store, plan)))
    assert [type(error) for error in job.rescue({0: save})] == [StoreError]
    assert job.catalog.visible() == [save]
    write_plan(plan, [])
    if swept:
        job.catalog.store.put(save.trash_key, TrashRecord(save, "never committed").encode())
        job.catalog.store.delete(*(entry.key for entry in job.catalog.store.scan("parts/")))
    errors = job.rescue({0: save})
    assert [type(error) for error in errors] == [SaveFailed if swept else type(None)]
    assert not swept or "has a trash record" in str(errors[0])


def damage(slot: Slot) -> None:
    """One byte of its body is another."""
    with slot.path.open("r+b") as file:
        file.seek(PAGE_BYTES)
        byte = file.read(1)[0]
        file.seek(PAGE_BYTES)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_damaged_slot_leaves_the_other_shares_to_be_put(job: Job, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One writer has both shares, the other one whole share of the rank whose own slot is damaged, and no more."""
    monkeypatch.setattr(module, "COMMIT_TIMEOUT_S", 300.0)  # the other writer may be putting what it stands in for
    save = job.snapshot(15)
    damage(job.hosts[rank][rank])
    del job.hosts[1 - rank][1 - rank]
    errors = job.rescue(dict.fromkeys(range(RANKS), save))
    assert job.catalog.visible() == [save], errors
    job.check(save)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_share_that_is_damaged_everywhere_is_no_step(job: Job, rank: int) -> None:
    save = job.snapshot(15)
    for slots in job.hosts.values():
        damage(slots[rank])
    errors = job.rescue(dict.fromkeys(range(RANKS), save))
    assert any(isinstance(error, StoreTimeout) for error in errors) == (rank == 1), errors  # the writer that commits
    assert job.catalog.visible() == []


def test_what_is_committed_is_not_put_again(job: Job) -> None:
    save = job.snapshot(15)
    job.rescue({0: save, 1: save})
    before = sorted(entry.key for entry in job.catalog.store.scan(""))
    assert job.rescue({0: save, 1: save}) == [None, None]
    assert sorted(entry.key for entry in job.catalog.store.scan("")) == before


@pytest.mark.parametrize("dropped", [False, True])
def test_nothing_is_put_of_a_step_of_which_another_snapshot_is_committed_or_was_dropped(
    job: Job, dropped: bool
) -> None:
    save = job.snapshot(15)
    job.rescue({0: save, 1: save})
    if dropped:
        drop(job.catalog, save)
    before = sorted(entry.key for entry in job.catalog.store.scan(""))
    job.hosts = {rank: [slot_of(job.directory, save, rank, 99, tensors(99), compared(99))] for rank in range(RANKS)}
    errors = job.rescue({0: save, 1: save})
    assert sorted(entry.key for entry in job.catalog.store.scan("")) == before
    if not dropped:
        assert errors == [None, None]
        job.check(save)
    else:
        assert all(isinstance(error, SaveFailed) for error in errors)
        assert "step 15: has a trash record, " in str(errors[0])
        assert "retention has dropped" in str(errors[0])


def test_a_slot_that_is_being_overwritten_is_not_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    save = job.snapshot(15)
    for slot in job.hosts[0]:
        monkeypatch.setattr(slot, "read_lock", lambda: False)  # as where another process writes to it
    [error] = job.rescue({0: save})
    assert isinstance(error, SaveFailed)
    assert "is being overwritten" in str(error)
    assert [entry.key for entry in job.catalog.store.scan(save.packs_prefix)] == []
    assert job.catalog.parts(save) == {}


def test_a_part_that_came_when_its_pack_was_gone_makes_no_step(job: Job) -> None:
    """A machine slept as it put its part, and sweeps deleted the pack meanwhile; the part is there at the next try."""
    save, store = job.snapshot(15), job.catalog.store
    with ThreadPoolExecutor(1) as executor:
        Persister(store, executor, 1, RANKS, 1e9).persist(job.hosts[1][1], save)
    store.delete(*(entry.key for entry in store.scan(save.packs_prefix)))
    assert any(isinstance(error, SaveFailed) for error in job.rescue({0: save, 1: save}))
    assert job.catalog.visible() == []


def test_two_snapshots_of_one_step_are_never_mixed(job: Job) -> None:
    """One for memory only, then a save of another state at that step; of this one rank 0 alone has put its part."""
    save = job.snapshot(15)
    saved = slot_of(job.directory, save, 0, 16, tensors(99), compared(16))
    store = LocalStore(str(job.directory / "root"))
    with ThreadPoolExecutor(1) as executor:
        Persister(store, executor, 0, RANKS, 1e9).persist(saved, save)
    assert job.rescue({0: save, 1: save}) == [None, None]
    assert job.catalog.visible() == [save]
    job.check(save)


def test_a_snapshot_that_differs_between_ranks_is_not_rescued(job: Job) -> None:
    save = SaveId(15, job.generation)
    for slots in job.hosts.values():
        checks = [check_of(15, rank, {(0, 1): b"%d" % rank}) for rank in range(RANKS)]
        slots += [slot_of(job.directory, save, rank, 15, tensors(15), checks[rank]) for rank in range(RANKS)]
    errors = job.rescue({0: save, 1: save})
    assert any(isinstance(error, ReplicasDiffer) for error in errors), errors
    assert job.catalog.visible() == []


def test_generations_are_told_apart(job: Job) -> None:
    """A slot of another generation with the same step is not a share of this one."""
    save = job.snapshot(15)
    other = SaveId(15, GenerationId(9, "99999999"))
    job.hosts[0] = [slot_of(job.directory, other, rank, 1, tensors(3)) for rank in range(RANKS)]
    job.rescue({0: save, 1: save})
    job.check(save)


@pytest.mark.parametrize("lost", range(RANKS))
def test_the_first_snapshot_of_a_step_counts_where_a_second_was_under_way(job: Job, lost: int) -> None:
    """One for memory only, which all ranks held; then a save of that step, of which this rank's share alone is there.
    The other host is lost, with its share of the second."""
    save, here = job.snapshot(15), 1 - lost
    second = slot_of(job.directory / f"host{here}", save, here, 16, tensors(99), compared(16))
    job.hosts[here].append(second)
    assert job.rescue({here: save}) == [None]
    assert job.catalog.visible() == [save]
    job.check(save)


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (StoreError("away"), True),
        (StoreTimeout("away"), True),
        (StoreFull("each try would put all of it once more"), False),
        (SaveFailed("a share is nowhere"), False),
        (OSError("odd"), False),
    ],
    ids=repr,
)
def test_only_an_outage_is_a_reason_to_try_again(
    job: Job, monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(process, "rescue", fail)
    writer = SimpleNamespace(_held=job.snapshot(15), _rank=0, _direct=None, _commits=SimpleNamespace(committer=None))
    writer._watchdog = SimpleNamespace(work=lambda *given: contextlib.nullcontext())
    writer._trainer, writer._beginning = SimpleNamespace(deadline_s=60.0), SimpleNamespace(owes_record=False)
    with pytest.raises(StoreError) if again else contextlib.nullcontext():
        WriterProcess._rescue(writer, [])  # type: ignore[arg-type]


def test_who_stood_in_for_rank_0_commits_at_the_next_try(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the share of rank 0 is there, and its host is gone."""
    save, commit = job.snapshot(15), Committer.commit

    def fail_once(*given: object) -> None:
        monkeypatch.setattr(Committer, "commit", commit)
        raise StoreTimeout("away")

    monkeypatch.setattr(Committer, "commit", fail_once)
    assert [type(error) for error in job.rescue({1: save})] == [StoreTimeout]
    assert job.rescue({1: save}) == [None]
    assert job.catalog.visible() == [save]
    job.check(save)


@pytest.mark.parametrize("failed", [False, True], ids=["alone", "beside-a-second-that-failed"])
def test_who_has_the_share_of_rank_0_commits_though_that_rank_has_put_it(job: Job, failed: bool) -> None:
    """Its host is lost before it commits. Behind a failure that was published, the next job would not commit either."""
    save, store = job.snapshot(15), job.catalog.store
    if failed:
        put_failure(store, save, 1, "the trainer died before its snapshot was whole")
    with ThreadPoolExecutor(1) as executor:
        Persister(store, executor, 0, RANKS, 1e9).persist(job.hosts[0][0], save)
    assert job.rescue({1: save}) == [None]
    assert job.catalog.visible() == [save]
    job.check(save)


def test_a_second_snapshot_that_failed_is_no_failure_of_the_first(
    job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was under way as the job died, which the writers have published. The other rank's share is large: it comes
    behind all for which the shares of others are waited for."""
    monkeypatch.setattr(module, "COMMIT_TIMEOUT_S", 300.0)
    save, store = job.snapshot(15), job.catalog.store
    del job.hosts[0][1]
    for rank in range(RANKS):
        put_failure(store, save, rank, "the trainer died before its snapshot was whole")
    late = [job.hosts[1][1]]

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if late and clock.monotonic() > module.SHARES_TIMEOUT_S + 60:
            with ThreadPoolExecutor(1) as executor:
                Persister(store, executor, 1, RANKS, 1e9).persist(late.pop(), save)

    faked = SimpleNamespace(monotonic=clock.monotonic, sleep=sleep)
    monkeypatch.setattr(module, "time", faked)
    monkeypatch.setattr(commit_module, "time", faked)
    assert job.rescue({0: save}) == [None]
    assert job.catalog.visible() == [save]
    job.check(save)


def test_a_job_that_begins_while_shares_are_waited_for_ends_the_rescue(
    job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer holds the memory of the slots, which that job has unlinked, until then."""
    monkeypatch.setattr(module, "COMMIT_TIMEOUT_S", 300.0)
    save, ids = job.snapshot(15), set(job.catalog.generations.ids())
    for slots in job.hosts.values():
        del slots[1]

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock.monotonic() > module.SHARES_TIMEOUT_S + 10 and {*job.catalog.generations.ids()} == ids:
            make_generation(job.catalog, number=2)

    faked = SimpleNamespace(monotonic=clock.monotonic, sleep=sleep)
    monkeypatch.setattr(module, "time", faked)
    monkeypatch.setattr(commit_module, "time", faked)
    assert [type(error) for error in job.rescue({0: save})] == [Superseded]


@pytest.mark.parametrize("host", range(RANKS), ids=["its own share", "another rank's"])
def test_a_writer_that_slept_between_packs_and_part_puts_no_part_and_tries_again(
    job: Job, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine was suspended, so that no clock went on by which anybody waits. Sweeps take the packs for the remains
    of a crash."""
    save, clock, slept = job.snapshot(15), time.clock_gettime, 0.0
    root = job.directory / "root"
    monkeypatch.setattr(time, "clock_gettime", lambda which: clock(which) + slept)

    def before(op: str, key: str) -> None:
        nonlocal slept
        if op == "commit" and key.startswith(f"packs/{save}/{0:06d}"):
            slept = 2 * DEADLINE_S

    job.stores[host] = ActorStore(LocalStore(str(root)))  # type: ignore[arg-type]
    job.stores[host].before = before  # type: ignore[attr-defined]
    assert [type(error) for error in job.rescue({host: save})] == [StoreTimeout]
    assert not [*root.glob(f"parts/{save}/{0:06d}-*")]
    for pack in root.glob(f"packs/{save}/{0:06d}-*"):
        pack.unlink()
    del job.stores[host]
    assert job.rescue({host: save}) == [None]
    assert job.catalog.visible() == [save]
    job.check(save)


@pytest.mark.parametrize("goes_on", [False, True])
def test_who_waits_for_the_commit_of_another_writer_sees_that_a_job_has_begun(
    job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """This writer knew of the step before alone; the share of rank 0 is there, and its writer is gone."""
    monkeypatch.setattr(module, "COMMIT_TIMEOUT_S", 300.0)
    save = job.snapshot(15)
    newer = job.begun(16, 0)
    job.hosts[1].append(slot_of(job.directory / "host1", newer, 1, 16, tensors(16)))
    began: list[float] = []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if not began and clock.monotonic() > module.SHARES_TIMEOUT_S + 10:
            began.append(clock.monotonic())
            make_generation(job.catalog, 2, save if goes_on else None)

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=sleep))
    assert [type(error) for error in job.rescue({1: save})] == [type(None) if goes_on else Superseded]
    assert job.catalog.saves() == ([save] if goes_on else [])
    assert job.ended - began[0] < (2 * module.SHARES_TIMEOUT_S if goes_on else 1), "it holds the memory meanwhile"


@pytest.mark.parametrize("rank", range(RANKS), ids=["who commits", "who waits for that"])
def test_a_newer_save_that_is_given_up_is_waited_for_no_longer(
    job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The word of that comes while this writer waits, and the step that all ranks held is committed at once."""
    monkeypatch.setattr(module, "COMMIT_TIMEOUT_S", 300.0)
    save = job.snapshot(15)
    newer = job.begun(16, 0)
    if rank:
        job.hosts[1].append(slot_of(job.directory / "host1", newer, 1, 16, tensors(16)))
    told: list[float] = []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if not told and clock.monotonic() > module.SHARES_TIMEOUT_S + 10:
            told.append(clock.monotonic())
            put_failure(job.catalog.store, newer, 1 - rank, "it is given up")

    faked = SimpleNamespace(monotonic=clock.monotonic, sleep=sleep)
    monkeypatch.setattr(module, "time", faked)
    monkeypatch.setattr(commit_module, "time", faked)
    assert job.rescue({rank: save}) == [None]
    assert job.catalog.visible() == [save]
    job.check(save)
    assert job.ended - told[0] < 2 * module.SHARES_TIMEOUT_S


@pytest.mark.parametrize(
    ("rank", "falls_back"), [(0, False), (0, True), (1, True)], ids=["who commits", "who commits a newer one", "waits"]
)
@pytest.mark.parametrize("left_s", [120.0, 30.0])
def test_nobody_waits_when_nothing_may_be_put_any_more(
    job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch, rank: int, falls_back: bool, left_s: float
) -> None:
    """Else a writer whose saves may take less than that were ended by its watchdog, and would not try again. Who falls
    back to the older snapshot has time to put that."""
    monkeypatch.setattr(module, "COMMIT_TIMEOUT_S", 300.0)
    save, began = job.snapshot(15), time.monotonic()
    if falls_back:
        newer = job.begun(16, 0)
        if rank:
            job.hosts[1].append(slot_of(job.directory / "host1", newer, 1, 16, tensors(16)))
    else:
        del job.hosts[0][1]
    faked = SimpleNamespace(monotonic=lambda: began + clock.monotonic(), sleep=clock.sleep)
    monkeypatch.setattr(module, "time", faked)
    monkeypatch.setattr(commit_module, "time", faked)
    job.deadline = began + left_s
    assert [type(error) for error in job.rescue({rank: save})] == [type(None) if falls_back else StoreTimeout]
    assert job.ended < left_s + (0 if falls_back else 2 * module.SHARES_TIMEOUT_S)
    assert job.catalog.saves() == ([save] if falls_back else [])
