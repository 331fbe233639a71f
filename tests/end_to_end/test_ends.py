"""How a Checkpointer ends: by saves that fail, a newer job, an exception, a signal."""

from __future__ import annotations

import gc
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from helpers.inside import forget_last_save, num_failures, refuse_slots
from helpers.moody import Moody
from helpers.one_job import WAIT_S, Job, catalog, faulty, slots, step_once, steps, wait_settled
from helpers.stage import held as held_back
from launch import Program, fork_one
from places import WORKERS

import ckptlib
from ckptlib.catalog.accounts import read_accounts
from ckptlib.errors import CheckpointNotFound, NoRoom, SaveFailed, Superseded, WaitTimeout
from ckptlib.stores.testing import write_plan


def test_failures_in_a_row_are_raised_and_earlier_steps_stay(job: Job) -> None:
    url = faulty(job, [])
    done: list[int] = []

    def train() -> None:
        with ckptlib.Checkpointer(url, job.state, every=3, arena=job.root.parent, max_outage=timedelta()) as ckpt:
            for step in range(1, 40):
                job.body()
                ckpt.after_step(step)
                done.append(step)
                wait_settled(ckpt)
                if step == 4:
                    faulty(job, [{"op": "commit", "key": "^packs/", "action": "full"}])

    with pytest.raises(SaveFailed, match=r"3 saves in a row failed.*no space, as planned"):
        train()
    assert done == list(range(1, 14)), "the third one failed in step 12, all agreed in 13, and acted in 14"
    assert steps(job.root) == [3]


def test_what_failed_here_is_told_with_its_reason(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """Before there is a save that could have an error."""
    ckpt = job.checkpointer(every=1)

    def no_room(nbytes: int) -> None:
        raise NoRoom("no room, as planned")

    refuse_slots(ckpt, no_room)

    def train() -> None:
        for step in range(1, 10):
            ckpt.after_step(step)

    with pytest.raises(SaveFailed, match=r"3 saves in a row failed.*no room, as planned"):
        train()
    said = [record.getMessage() for record in caplog.records]
    assert all(line.count("could not be saved") == 1 for line in said if "no room" in line)
    with pytest.raises(SaveFailed, match="step 3 was to be saved and is not"):
        ckpt.close()


def test_a_last_save_whose_state_could_not_be_had_is_no_success(job: Job) -> None:
    """Though the program has caught what its own object raised."""

    job.state["moody"] = moody = Moody()
    ckpt = job.checkpointer(every=1)
    ckpt.after_step(1)
    wait_settled(ckpt)
    moody.raises = OSError("a file that is not there")
    with pytest.raises(OSError, match="a file that is not there"):
        ckpt.after_step(2)
    with pytest.raises(SaveFailed, match="step 2 was to be saved and is not, nor is a later one: a file"):
        ckpt.close()
    assert steps(job.root) == [1]


def test_waits_without_end(job: Job) -> None:
    """A save that was on its way was told as one that will never be, and `close` left everything open."""
    ckpt = job.checkpointer(every=100)
    with held_back(ckpt._session.stager) as gate:
        pending = ckpt.save(1)
        threading.Timer(0.3, gate.set).start()
        assert pending.result(math.inf) == 1
    ckpt.after_step(2)
    ckpt.save(2)
    ckpt.close(timedelta.max)
    assert ckpt._session.closed
    assert steps(job.root) == [1, 2]


@pytest.mark.parametrize("told", [False, True])
def test_a_last_save_that_cannot_be_taken_is_no_success(job: Job, told: bool) -> None:
    """It was logged, and the run ended as if the save before were the last one; so it did after SIGTERM."""

    def no_room(nbytes: int) -> None:
        raise NoRoom("no room, as planned")

    def train() -> None:
        with job.checkpointer(every=2) as ckpt:
            for step in ckpt.loop(0, 9 if told else 5):
                job.body()
                wait_settled(ckpt)
                if step == 4:
                    refuse_slots(ckpt, no_room)
                    if told:
                        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(
        SaveFailed, match=r"step [56] was to be saved and is not, nor is a later one: no room, as planned"
    ):
        train()
    assert steps(job.root) == [2, 4]


@pytest.mark.parametrize("how", ["taken", "not taken", "exit"])
def test_a_last_save_that_fails_leaves_what_is_in_memory_to_the_next_start(
    job: Job, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is newer than all that is in the store; `close` removed it as if the job had come to its end.

    "exit": by a handler of the program's own, as it waits for that save.
    """
    url, due, bits, step = faulty(job, []), set[int](), dict[int, list[bytes]](), 2

    def checkpointer() -> ckptlib.Checkpointer:
        peers, every = ckptlib.Peers(every=1, copies=0), lambda step: step in due
        return ckptlib.Checkpointer(url, job.state, every=every, peers=peers, arena=job.root.parent)

    def no_room(nbytes: int) -> None:
        raise NoRoom("no room, as planned")

    def leave(timeout: float) -> None:
        raise SystemExit(1)

    def trained() -> None:
        nonlocal step
        job.body()
        step += 1
        bits[step] = job.bits()
        ckpt.after_step(step)

    ckpt = checkpointer()
    ckpt.save(2).wait_committed(WAIT_S)
    faulty(job, [{"op": "commit", "key": "^packs/", "action": "full"}])
    while ckpt.coverage is None or (ckpt.coverage.step or 0) <= 2:
        trained()
    if how == "not taken":
        refuse_slots(ckpt, no_room)
        due.update(range(step + 1, step + 4))
        for _ in range(5):
            trained()
    else:
        pending = ckpt.save(step)
        if how == "exit":
            wait_settled(ckpt)
            monkeypatch.setattr(pending, "wait_committed", leave)
    with pytest.raises(SystemExit if how == "exit" else SaveFailed):
        ckpt.close()
    assert steps(job.root) == [2]
    faulty(job, [])
    with checkpointer() as ckpt:
        report = ckpt.restore()
        assert (report.step > 2, report.tier) == (True, "memory")
        assert job.bits() == bits[report.step]
    assert slots(job.root.parent) == []


def test_a_save_that_was_taken_later_makes_up_for_one_that_was_not(job: Job) -> None:
    with job.checkpointer(every=2) as ckpt:
        take = ckpt._session.snapshots.take_slot
        for step in ckpt.loop(0, 5):
            job.body()
            wait_settled(ckpt)
            if step == 3:
                refuse_slots(ckpt, lambda nbytes: (_ for _ in ()).throw(NoRoom("for a while")))
            elif step == 4:
                ckpt._session.snapshots.take_slot = take  # type: ignore[method-assign]
    assert steps(job.root) == [2, 5]


def program_of(job: Job, text: str, *args: object) -> Program:
    script = job.root.parent / "program.py"
    script.write_text(text)
    return Program(script, *args, log=script.with_suffix(".log"))


_CTRL_C = """
import sys, torch, ckptlib
model = torch.nn.Linear(600, 600)
with ckptlib.Checkpointer(sys.argv[1], {"m": model}, every=100, arena=sys.argv[2]) as ckpt:
    for step in ckpt.loop(0, 3):
        model.weight.data.add_(1)
    ckpt.pending.wait_staged(60)
    print("closing", flush=True)
"""


def test_ctrl_c_as_it_waits_for_the_last_save_leaves_it_to_the_writer(job: Job) -> None:
    """It took a second one then, and that took the slot from the writer, which had to give the step up."""
    url = faulty(job, [{"op": "commit", "key": "^packs/", "action": "hold"}])
    with program_of(job, _CTRL_C, url, job.root.parent) as process:
        process.wait_for("closing")
        time.sleep(0.3)  # so that it waits, as a rule; it holds wherever the signal comes
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(WAIT_S) == 1
        assert process.printed().endswith("\nKeyboardInterrupt\n")
    assert steps(job.root) == []
    faulty(job, [])
    deadline = time.monotonic() + WAIT_S
    while steps(job.root) != [3] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert steps(job.root) == [3]


_AT_EXIT = """
import sys, torch, ckptlib
from ckptlib.saving.outcome import Outcomes
close = Outcomes.close
def closing(*given):
    print("closing", flush=True)
    return close(*given)
Outcomes.close = closing
ckptlib.save_async(sys.argv[1], {"w": torch.zeros(300_000)}, 3).wait_staged(60)
"""


def test_ctrl_c_at_the_exit_of_a_program_leaves_its_save_to_the_writer(job: Job) -> None:
    """No Checkpointer waits there, only the session. It took the slot from the writer."""
    url = faulty(job, [{"op": "commit", "key": "^packs/", "action": "hold"}])
    with program_of(job, _AT_EXIT, url) as process:
        process.wait_for("closing")
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(WAIT_S) is not None
    assert steps(job.root) == []
    faulty(job, [])
    wait_until(lambda: steps(job.root) == [3])


def test_slots_are_left_to_a_writer_that_does_not_finish_in_time(job: Job) -> None:
    url = faulty(job, [{"op": "commit", "key": "^packs/", "action": "hold"}])
    ckpt = ckptlib.Checkpointer(url, job.state, every=1000, arena=job.root.parent)
    ckpt.save(3).wait_staged(WAIT_S)
    forget_last_save(ckpt)  # as where a later one is committed already
    with pytest.raises(WaitTimeout, match="goes on alone"):
        ckpt.close(timedelta(seconds=0.5))
    assert slots(job.root.parent) != []
    faulty(job, [])
    wait_until(lambda: steps(job.root) == [3])
    wait_until(lambda: slots(job.root.parent) == [])


def test_nothing_is_told_of_a_save_that_was_left_to_the_writer(job: Job) -> None:
    """Other writers were started for whoever asked, and by their deaths a step that is committed was told to fail."""
    url = faulty(job, [{"op": "commit", "key": "^packs/", "action": "hold"}])
    ckpt = ckptlib.Checkpointer(url, job.state, every=1000, arena=job.root.parent)
    pending = ckpt.save(3)
    pending.wait_staged(WAIT_S)
    with pytest.raises(WaitTimeout):
        ckpt.close(timedelta(seconds=0.5))
    faulty(job, [])
    wait_until(lambda: steps(job.root) == [3])
    wait_until(lambda: slots(job.root.parent) == [])
    assert not pending.done()
    for wait in (pending.wait_released, pending.wait_local, pending.wait_committed):
        with pytest.raises(WaitTimeout, match=r"step 3: .* `ckptlib ls` tells"):
            wait(WAIT_S)
    assert pending.error is None


def test_one_failure_is_a_warning(job: Job) -> None:
    url = faulty(job, [{"op": "commit", "key": "^packs/", "action": "error", "nth": 1}])
    with ckptlib.Checkpointer(url, job.state, every=3, arena=job.root.parent) as ckpt:
        for step in range(1, 10):
            job.body()
            ckpt.after_step(step)
            wait_settled(ckpt)
        assert num_failures(ckpt) == 0
    assert steps(job.root) == [3, 9]


def test_an_older_job_is_superseded(job: Job) -> None:
    def train() -> None:
        with job.checkpointer(every=3) as old:
            for step in range(1, 4):
                step_once(old, step)
            with job.checkpointer(every=3) as new:
                for step in range(1, 7):
                    step_once(new, step)
            for step in range(4, 20):
                job.body()
                old.after_step(step)
                wait_settled(old)

    with pytest.raises(Superseded):
        train()
    assert [save.generation.number for save in catalog(job.root).saves()] == [1, 2, 2]


def test_an_exception_comes_out_as_it_is(job: Job) -> None:
    def train() -> None:
        with job.checkpointer(every=1) as ckpt:
            job.body()
            ckpt.after_step(1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    wait_until(lambda: steps(job.root) == [1])
    wait_until(lambda: slots(job.root.parent) == [])


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- signals


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_the_loop_after_a_last_save(job: Job, signal_number: int) -> None:
    seen = []

    def train() -> None:
        with job.checkpointer(every=1000) as ckpt:
            for step in ckpt.loop(0, 100):
                seen.append(step)
                job.body()
                if step == 6:
                    os.kill(os.getpid(), signal_number)
            assert ckpt.stopping

    with pytest.raises(ckptlib.Preempted, match="75"):
        train()
    expected = job.bits()
    assert seen == list(range(8)), "agreed upon one step later"
    assert steps(job.root) == [8]
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)] == [signal.SIG_DFL] * 2
    ckptlib.load(job.root, job.state)
    assert job.bits() == expected


@pytest.mark.parametrize("block", [True, False], ids=["in a with block", "without one"])
def test_a_loop_that_does_not_ask_whether_to_stop_ends_all_the_same(job: Job, block: bool) -> None:
    """It saved each of its steps as the last one, until it was killed."""
    seen = []

    def train(ckpt: ckptlib.Checkpointer) -> None:
        for step in range(1, 100):
            seen.append(step)
            job.body()
            if step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            ckpt.after_step(step)

    ckpt = job.checkpointer(every=1000)
    with pytest.raises(ckptlib.Preempted, match="75"), ckpt if block else nullcontext():
        train(ckpt)
    assert seen == list(range(1, 10)), "agreed upon in step 7 for step 8, and refused in step 9"
    assert steps(job.root) == [8]
    assert slots(job.root.parent) == [], "the commit was waited for"
    [account] = read_accounts(catalog(job.root)).told.values()
    assert account.end == "closed"
    with pytest.raises(ValueError, match="is closed"):
        ckpt.after_step(10)


@pytest.mark.parametrize("at", [7, 99], ids=["within the first", "as the first ends"])
def test_a_signal_ends_all_loops_of_a_program(job: Job, at: int) -> None:
    """The next loop did one body, and its step was committed: a restart would have gone on from there."""
    bodies = []

    def train() -> None:
        with job.checkpointer(every=1000) as ckpt:
            for step in (step for epoch in range(3) for step in ckpt.loop(100 * epoch, 100 * epoch + 100)):
                bodies.append(step)
                job.body()
                if len(bodies) == at:
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(ckptlib.Preempted, match="75"):
        train()
    assert bodies == list(range(at + 1))
    assert steps(job.root) == [at + 1]


def test_a_handler_of_the_users_own_is_left_alone(job: Job) -> None:
    seen = []
    before = signal.signal(signal.SIGTERM, lambda *args: seen.append(args))
    try:
        with job.checkpointer() as ckpt:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in ckpt.loop(0, 3):
                job.body()
            assert not ckpt.stopping
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(seen) == 1


def run(kind: str, url: str, tmp_path: Path) -> tuple[int | None, str]:
    """The exit status of a job, and all that it printed."""
    log = tmp_path / f"{kind}.log"
    status = fork_one(WORKERS / "jobs.py", kind, url, tmp_path, log=log, timeout_s=120)
    return status, log.read_text()


def told(last: int) -> str:
    return f"asked to stop: saving step {last}, the last one\n"


def test_a_terminated_job_says_by_its_status_that_it_is_not_done_and_is_continued(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert run("terminated", str(root), tmp_path) == (75, f"start 0\n{told(9)}ended 9 True\n")
    assert steps(root) == [9]
    done = run("terminated twice", str(root), tmp_path)
    assert done == (75, f"start 9\n{told(18)}ended 18 True\n"), "by all who pass it on"
    assert steps(root) == [9, 18]
    done = run("terminated again later", str(root), tmp_path)
    assert done == (-signal.SIGTERM, "start 18\n"), "the second one kills as ever"
    assert steps(root) == [9, 18]
    wait_until(lambda: slots(tmp_path) == [])


def test_a_job_that_raises_does_not_wait_and_its_writer_finishes(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "commit", "key": "^packs/", "action": "hold"}])
    root = tmp_path / "root"
    status, printed = run("raises", f"fault+file://{root}?plan={quote(str(plan))}", tmp_path)
    assert status == 1
    assert 'KeyError: "the trainer\'s own trouble"' in printed
    assert steps(root) == [], "nobody waited for what the store holds"
    plan.unlink()
    wait_until(lambda: steps(root) == [9])
    wait_until(lambda: slots(tmp_path) == [])


def test_a_model_goes_with_its_checkpointer_before_garbage_is_collected(tmp_path: Path) -> None:
    """A program that trains one model after the other had the memory of two: Python collects such garbage seldom, and
    torch never when a device has no memory. What a store lacks was an error that kept the locals of all callers."""

    def train(**options: object) -> weakref.ref[torch.nn.Module]:
        model = torch.nn.Linear(9, 9)
        with ckptlib.Checkpointer(tmp_path / "root", {"model": model}, every=1, arena=tmp_path, **options) as ckpt:
            for _ in ckpt.loop(ckpt.restore().step, 2):
                model.weight.data.add_(1)
        return weakref.ref(model)

    def look() -> weakref.ref[torch.nn.Module]:
        model = torch.nn.Linear(9, 9)
        with suppress(CheckpointNotFound):
            ckptlib.load(tmp_path / "none", {"model": model})
        return weakref.ref(model)

    gc.disable()
    try:
        left = [train(), train(peers=ckptlib.Peers(copies=0)), look()]
        wait_until(lambda: [model() for model in left] == [None] * 3)  # a thread may be about to let go of an error
    finally:
        gc.enable()
