"""Ctrl-C while a Checkpointer opens, or a save begins: whoever catches it trains on, saves on and closes, and no half
of a snapshot is saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
from helpers.interrupted import interrupted_at
from helpers.one_job import WAIT_S, Job, slots, steps
from helpers.stage import num_installed

import ckptlib
from ckptlib.saving import memory

PLACES = {
    "Stager.begin": "the writer expects a snapshot that nobody takes",
    "Stager.copy": "a snapshot that was begun is never filled",
    "Fence.guard": "nothing keeps the optimizer from what is to be copied",
    "TrainingSteps._warn_of_metrics": "the fence waits for a copy that nobody lets go",
    "JobThread.put": "nobody copies what was let go",
}


def second_step_interrupted(job: Job, ckpt: ckptlib.Checkpointer, place: str) -> None:
    """Behind a first one that is saved."""
    job.body()
    ckpt.after_step(1)
    assert ckpt.pending is not None
    ckpt.pending.wait_committed(WAIT_S)
    job.body()
    with interrupted_at(place):
        ckpt.after_step(2)


@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on(job: Job, place: str) -> None:
    with job.checkpointer(every=1) as ckpt:
        second_step_interrupted(job, ckpt, place)
        for step in (3, 4):
            job.body()
            ckpt.after_step(step)
        ckpt.save(4).wait_committed(WAIT_S)
        told = job.bits()
        ckpt.close(timedelta(seconds=WAIT_S))
    assert {1, 4} <= {*steps(job.root)}
    may = place in ("TrainingSteps._warn_of_metrics", "JobThread.put")
    assert (2 in steps(job.root)) <= may, "the fence let it go"
    assert slots(job.root.parent) == []
    job.body()
    ckptlib.load(job.root, job.state)
    assert job.bits() == told


@pytest.mark.parametrize("place", PLACES)
def test_close_does_not_wait_for_what_never_began(job: Job, place: str) -> None:
    ckpt = job.checkpointer(every=1)
    second_step_interrupted(job, ckpt, place)
    with nullcontext() if place.startswith("Stager.") else pytest.raises(ckptlib.SaveFailed, match="interrupted"):
        ckpt.close(timedelta(seconds=WAIT_S))
    assert steps(job.root) == [1]
    assert slots(job.root.parent) == []


def test_a_close_that_is_interrupted_as_it_listens_to_the_writer_leaves_nothing(job: Job) -> None:
    with nothing_left(job):
        ckpt = job.checkpointer(every=1)
        with interrupted_at("Outcomes.poll"):
            ckpt.close()


@pytest.mark.parametrize("place", ["Stopwatch.begin_step", "Profile.begin", "Turns.agreed"])
def test_a_step_that_was_interrupted_before_its_word_is_left_out(job: Job, place: str) -> None:
    """The word that this rank gave for it is no reason to refuse the next one."""
    with job.checkpointer(every=1) as ckpt:
        second_step_interrupted(job, ckpt, place)
        for step in (3, 4):
            job.body()
            ckpt.after_step(step)
        with pytest.raises(ckptlib.AgreementFailed, match="leave none out"):
            ckpt.after_step(6)
    assert {1, 4} <= {*steps(job.root)} <= {1, 3, 4}


@pytest.mark.parametrize("place", ["Stopwatch.begin_step", "Turns.agreed"])
def test_a_step_that_was_interrupted_may_be_done_again(job: Job, place: str) -> None:
    with job.checkpointer(every=1) as ckpt:
        second_step_interrupted(job, ckpt, place)
        ckpt.after_step(2)
    assert steps(job.root) == [1, 2]


@pytest.mark.parametrize("place", ["Stager.begin", "Stager.copy", "JobThread.put"])
def test_a_call_of_save_behind_one_that_was_interrupted_is_a_save(job: Job, place: str) -> None:
    """As in a notebook. Without a slot, it would wait for longer than a save may take."""
    with job.checkpointer(every=1000, save_deadline=timedelta(seconds=60)) as ckpt:
        job.body()
        ckpt.save(1)
    for step in (2, 3):  # more than there are slots
        job.body()
        with interrupted_at(place):
            ckptlib.save(job.root, job.state, step=step)
    ckptlib.save(job.root, job.state, step=4)
    told = job.bits()
    assert steps(job.root) == [1, 4]
    job.body()
    ckptlib.load(job.root, job.state)
    assert job.bits() == told


OPENING = [
    "Writer._start",
    "Stager.__init__",
    "Verdicts.__init__",
    "Turns.__init__",
    "StopSignal._install",
    "_Watch.begin",
    "TrainingSteps.__init__",
    "Resumption.warm",
    "StateKeeper.begin",
]


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("ckptlib-")}


def children() -> set[str]:
    """Processes that this one has started and that run."""
    tasks = Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
    return {pid for pid in tasks if (stat := Path(f"/proc/{pid}/stat")).exists() and ") Z " not in stat.read_text()}


def locks() -> set[str]:
    """Of writers, that this process has open; of other tests, too."""
    fds = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    return {path for path in map(os.path.realpath, fds) if ".writer" in path}


def wait_for(nothing: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while nothing():
        assert time.monotonic() < deadline, nothing()
        time.sleep(0.01)


@contextmanager
def nothing_left(job: Job) -> Iterator[None]:
    """No thread, writer or lock of one, no slot, no fence or handler of a signal; the next one works."""
    before, others, held, fences = threads(), children(), locks(), num_installed()
    yield
    wait_for(lambda: threads() - before)
    wait_for(lambda: children() - others)
    assert slots(job.root.parent) == []
    assert [*job.root.parent.glob("*.writer")] == []
    assert locks() <= held
    assert num_installed() <= fences
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == [signal.SIG_DFL] * 2
    assert signal.set_wakeup_fd(-1) == -1
    with job.checkpointer(every=1) as ckpt:
        job.body()
        ckpt.after_step(1)
    assert steps(job.root) == [1]


@pytest.mark.parametrize("place", OPENING)
def test_a_constructor_that_is_interrupted_leaves_nothing(
    job: Job, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # one process needs no watch for a rank that hangs
    with nothing_left(job), interrupted_at(place):
        job.checkpointer(every=1)


def test_a_constructor_that_is_interrupted_as_it_begins_to_make_slots_leaves_nothing(job: Job) -> None:
    with nothing_left(job), interrupted_at("Thread.start", "ckptlib-arena"):
        job.checkpointer(every=1)


def test_a_state_that_is_refused_leaves_nothing(job: Job) -> None:
    with nothing_left(job), pytest.raises(ckptlib.UnsupportedState):
        ckptlib.Checkpointer(job.root, {**job.state, "what": object()}, every=1, arena=job.root.parent)


def test_memory_that_another_rank_has_no_room_for_leaves_nothing(job: Job) -> None:
    def on_all_but_one(group: object, what: str, call: Callable[[], object]) -> None:
        call()
        raise ckptlib.NoRoom(f"{what} failed on 1 of 2 ranks")

    with nothing_left(job), pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "together", on_all_but_one)
        with pytest.raises(ckptlib.NoRoom):
            job.checkpointer(every=1)


MET = ("Writer._note", "News.tell", "Outcomes.note", "Outcomes._failed")
"""Where what is interrupted was met again before, too."""


@pytest.mark.parametrize("place", ["Snapshots.released", *(pytest.param(p, marks=pytest.mark.slow) for p in MET)])
def test_what_the_writer_told_as_it_came_is_not_lost(job: Job, place: str) -> None:
    """Else its slot would never be free again, and a save that needs it wait for longer than a save may take."""
    with job.checkpointer(every=1000, save_deadline=timedelta(seconds=20)) as ckpt:
        job.body()
        ckpt.save(1).wait_committed(WAIT_S)
        if place == "Outcomes._failed":
            job.root.joinpath("packs").rename(job.root / "aside")
            job.root.joinpath("packs").touch()
        for step in range(2, 6):  # more than there are slots
            job.body()
            pending = ckpt.save(step)
            with interrupted_at(place):
                pending.wait_committed(WAIT_S)
        if place == "Outcomes._failed":
            job.root.joinpath("packs").unlink()
            job.root.joinpath("aside").rename(job.root / "packs")
        job.body()
        ckpt.save(6).wait_committed(WAIT_S)
    assert 6 in steps(job.root)
