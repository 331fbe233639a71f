"""What this rank tells of its snapshots in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.stage import seal
from support import ROOT_ID

from ckptlib.errors import NoRoom, SaveFailed
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.peers.replicator import Replicator
from ckptlib.policy.peers import Peers
from ckptlib.ranks.held import NONE
from ckptlib.saving.snapshots import Snapshots
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.placement import place
from ckptlib.staging.arena import Arena
from ckptlib.staging.stager import Content, Staging

GENERATION = GenerationId(1, "0" * 8)


def begun(snapshots: Snapshots, step: int, persists: bool, slot: Any) -> Staging:
    save = SaveId(step, GENERATION)
    content: Any = Content(SlotHeader(ROOT_ID, save, 0, 1, step, 2, 4096, {}), b"", None, {}, {}, 0.0, "xxh3")  # type: ignore[arg-type]
    staging = Staging(slot, content)
    snapshots.begin(save, step, staging, persists)
    return staging


@pytest.mark.parametrize("persists", [False, True])
def test_snapshots_that_fail_behind_the_training_are_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, persists: bool
) -> None:
    """Such as for the want of room behind the body. Of what is persisted the writer tells."""
    snapshots = Snapshots(ROOT_ID, Arena(ROOT_ID, GENERATION, tmp_path, 3), None, None, lambda step: None)

    def come_to_an_end(step: int, error: Exception | None) -> None:
        staging = begun(snapshots, step, persists, snapshots.arena.take(4096, 100, ()))
        staging.error = error
        seal(staging)
        snapshots.poll()

    for step, error in enumerate([NoRoom("full"), NoRoom("full"), None, NoRoom("full again"), SaveFailed("no")], 1):
        come_to_an_end(step, error)
    told = [record.getMessage() for record in caplog.records]
    said = "is not kept in memory; said once, until one is again"
    assert told == ([] if persists else [f"step 1 {said}: full", f"step 4 {said}: full again"])
    snapshots.close(clean=True)


class Job:
    """Of one rank with peers, without copies: the rank's own slots are four, a holder's would be three."""

    def __init__(self, directory: Path) -> None:
        placement = place(["A"], 0)
        replicator = Replicator(None, 0, placement, Peers(copies=0), lambda: Arena(ROOT_ID, GENERATION, directory, 3))
        arena = Arena(ROOT_ID, GENERATION, directory, 4)
        self.held: list[int] = []
        self.snapshots = Snapshots(ROOT_ID, arena, placement, replicator, self.held.append)
        self.recorded = True
        """Whether the record of the generation is there: else nothing counts as held."""
        self._steps = 0

    def has_room(self) -> bool:
        return self.snapshots.needs_held() <= self.snapshots.held_by_all

    def begin(self, again: bool = False, persists: bool = False) -> Staging:
        """Of the next step, or of the same once more."""
        self._steps += not again
        return begun(self.snapshots, self._steps, persists, slot=self.snapshots.take_slot(4096))

    def settle(self, staging: Staging) -> None:
        """On all ranks."""
        seal(staging)
        self.snapshots.poll()
        self.beat()

    def beat(self) -> None:
        own = self.snapshots.own
        self.snapshots.note_all(own.newest if self.recorded else NONE, own.since, own.settled)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    job.snapshots.close(clean=True)


def test_no_snapshot_begins_for_which_holders_have_no_slot(job: Job) -> None:
    """They have three: of the one that all hold, and of two on their way. The rank itself has four."""
    on_their_way = [job.begin(), job.begin()]
    assert job.has_room(), "none is held yet"
    on_their_way.append(job.begin())
    assert not job.has_room()
    job.settle(on_their_way.pop(0))
    assert job.snapshots.held_by_all == 1
    assert not job.has_room(), "one is held, and two are on their way"
    on_their_way[0].error = NoRoom("full")
    job.settle(on_their_way.pop(0))
    assert job.has_room(), "what failed is needed by nobody"
    job.settle(on_their_way.pop(0))
    assert job.has_room()


def test_without_a_record_there_is_room_for_snapshots(job: Job) -> None:
    """For as many as ever: the newest that all hold stays, in the place of one that counts."""
    job.recorded = False
    on_their_way = [job.begin(), job.begin(), job.begin()]
    for _ in range(5):
        job.settle(on_their_way.pop(0))
        assert not job.has_room(), "one may count yet, and two are on their way"
        job.settle(on_their_way.pop(0))
        assert job.has_room(), "the older one is needed by nobody"
        on_their_way += [job.begin()]
        assert not job.has_room()
        on_their_way[0].error = NoRoom("full")
        job.settle(on_their_way.pop(0))
        assert job.has_room(), "what failed counts never"
        on_their_way += [job.begin(), job.begin()]
    job.recorded = True
    for staging in on_their_way:
        job.settle(staging)
    assert job.held == [16, 17, 18]


def test_a_snapshot_that_counts_once_its_record_is_there_keeps_its_slot(job: Job) -> None:
    """No other one is offered it, whether that begins before the record is there or after."""
    job.recorded = False
    first = job.begin()
    job.settle(first)
    others = [job.begin()]
    job.recorded = True
    job.beat()
    assert job.held == [1]
    for _ in range(5):
        others[-1].error = NoRoom("full")
        job.settle(others[-1])
        others.append(job.begin())
    assert first.slot not in [other.slot for other in others]


def test_without_a_record_what_another_rank_lacks_is_on_its_way_no_more(job: Job) -> None:
    """It will never count, so it takes no room of the next one."""
    on_their_way = [job.begin(), job.begin(), job.begin()]
    seal(on_their_way.pop(0))
    job.snapshots.poll()
    assert not job.has_room()
    job.snapshots.note_all(NONE, latest_since=2, settled=1)
    assert job.has_room()
    for staging in on_their_way:
        job.settle(staging)


def test_a_rank_has_a_slot_more_only_while_its_writer_keeps_one(job: Job) -> None:
    """Each is as large as the state."""
    arena = job.snapshots.arena
    job.settle(job.begin())
    job.snapshots.make_room()
    arena.await_made()
    assert len(arena.slots) == 1
    job.settle(job.begin(persists=True))
    job.snapshots.make_room()
    arena.await_made()
    assert len(arena.slots) == 3


@pytest.mark.parametrize(("error", "differs"), [(None, False), (NoRoom("full"), False), (None, True)])
def test_the_first_snapshot_of_a_step_that_all_hold_stays_beside_a_second_one(
    job: Job, error: Exception | None, differs: bool
) -> None:
    """Such as a save behind one for memory only. Should the job die, the writers persist the first."""
    first = job.begin()
    job.settle(first)
    second = job.begin(again=True)
    second.error = error
    job.settle(second)
    if differs:
        job.snapshots.void(1)
    for _ in range(3):
        other = job.begin()
        assert other.slot is not first.slot
        other.error = NoRoom("full")
        job.settle(other)
    assert job.held == [1]
