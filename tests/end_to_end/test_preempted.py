"""Jobs that are told to stop otherwise than by SIGTERM, and jobs that cannot hear it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from launch import Program, environment
from places import TESTS, WORKERS

import ckptlib
from ckptlib.errors import EXIT_PREEMPTED, WaitTimeout
from ckptlib.policy import preemption, stop_signal
from ckptlib.policy.stop_signal import STATUS
from ckptlib.saving.session import Session
from ckptlib.stores.testing import write_plan


def start(kind: str, url: Path | str, directory: Path, **variables: str) -> Program:
    return Program(WORKERS / "jobs.py", kind, url, directory, log=directory / "log", variables=variables)


def steps(url: Path) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(url)]


@pytest.mark.parametrize("kind", [pytest.param("hangs", marks=pytest.mark.slow), "told, hangs"])
def test_a_training_that_stands_still_is_left(tmp_path: Path, kind: str) -> None:
    """A launcher that waits for it would kill it after half a minute; one rank of two, as far as it knows."""
    root = tmp_path / "root"
    with start(kind, root, tmp_path, WORLD_SIZE="2") as job:
        job.wait_for("hangs")
        if kind == "hangs":
            os.kill(job.pid, signal.SIGUSR1)
            assert job.wait(2) is None, "who warns first leaves it time"
            os.kill(job.pid, signal.SIGTERM)
        assert job.wait(150) == STATUS == 143
    assert steps(root) == [8]


@pytest.mark.slow
def test_a_job_of_one_process_is_not_left(tmp_path: Path) -> None:
    """There is no other rank that it could wait for in vain: what it computes has an end, and then it saves."""
    root = tmp_path / "root"
    command = [sys.executable, "workers/jobs.py", "computes", str(root), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=TESTS, env=environment(), text=True, **pipes) as job:
        assert job.stdin is not None
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["start 0\n", "computes\n"]
        job.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(2)
        job.stdin.write("\n")
        job.stdin.flush()
        assert job.wait(150) == EXIT_PREEMPTED
    assert steps(root) == [9]


@pytest.mark.slow
def test_a_job_is_not_left_while_it_waits_for_a_slot(tmp_path: Path) -> None:
    """What `save` was called for is not in memory yet, and all else is in good order; one rank of two, as it knows."""
    root, plan = tmp_path / "root", tmp_path / "plan.json"
    write_plan(plan, [{"op": "commit", "key": "^packs/", "action": "hold"}])
    url = f"fault+file://{root}?plan={quote(str(plan))}"
    with start("saves", url, tmp_path, WORLD_SIZE="2") as job:
        job.wait_for("saves")
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(2) is None
        plan.unlink()
        assert job.wait(150) == EXIT_PREEMPTED
    assert steps(root) == [6, 7, 8, 9]


def test_a_job_is_not_left_while_its_last_step_waits_for_a_slot(tmp_path: Path) -> None:
    """It has come to its end, and ends as ever; it left by status 143, without its last step."""
    root, plan = tmp_path / "root", tmp_path / "plan.json"
    write_plan(plan, [{"op": "commit", "key": "^packs/", "action": "hold"}])
    url = f"fault+file://{root}?plan={quote(str(plan))}"
    with start("ends without a slot", url, tmp_path, WORLD_SIZE="2") as job:
        job.wait_for("last")
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(2) is None
        plan.unlink()
        assert job.wait(150) == 0
    assert steps(root) == [18, 19, 20]


def test_whoever_waits_for_a_commit_is_not_left(tmp_path: Path) -> None:
    """As with saves that are waited for one by one. The wait of another thread says nothing about the main one."""
    root, plan = tmp_path / "root", tmp_path / "plan.json"
    write_plan(plan, [{"op": "commit", "key": "^packs/", "action": "hold"}])
    pending = ckptlib.save_async(f"fault+file://{root}?plan={quote(str(plan))}", {"w": torch.ones(1000)}, 1)
    may_stand_still = stop_signal._handler._may_stand_still
    begin, failed = threading.Event(), list[str]()

    def watch() -> None:
        with pytest.raises(WaitTimeout):
            pending.wait_committed(0.2)
        if may_stand_still():
            failed.append("the main thread waits for nothing yet")
        begin.set()
        deadline = time.monotonic() + 30
        while not may_stand_still() and time.monotonic() < deadline:
            time.sleep(0.01)
        if not may_stand_still():
            failed.append("the main thread waits for the commit, and would be left")
        plan.unlink()

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin.wait(60)
    pending.wait_committed(150)
    watcher.join()
    assert not failed
    assert not may_stand_still()
    assert steps(root) == [1]


@pytest.mark.slow
def test_a_job_at_its_end_is_not_left_while_it_waits_for_the_last_commit(tmp_path: Path) -> None:
    """In a container its writer would end with it, long before the launcher kills."""
    root, plan = tmp_path / "root", tmp_path / "plan.json"
    write_plan(plan, [{"op": "commit", "key": "^packs/", "action": "hold"}])
    url = f"fault+file://{root}?plan={quote(str(plan))}"
    with start("ends", url, tmp_path) as job:
        job.wait_for("ended 20 False")
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(2) is None
        plan.unlink()
        assert job.wait(150) == 0
    assert steps(root) == [20]


def test_a_question_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors of it are told once, and mean nothing."""
    monkeypatch.setattr(preemption, "EVERY_S", 0.01)
    asked = []

    def preempted() -> bool:
        asked.append(1)
        if len(asked) < 4:
            raise ConnectionError("no route to the service")
        return len(asked) > 6

    state = {"w": torch.zeros(3)}

    def train() -> None:
        with ckptlib.Checkpointer(tmp_path, state, every=10**9, preempted=preempted) as ckpt:
            for _ in ckpt.loop(0, 10**9):
                state["w"] += 1

    with pytest.raises(ckptlib.Preempted) as ended:
        train()
    assert ended.value.code == 75
    assert [record.getMessage() for record in caplog.records].count(
        "preempted=: ConnectionError('no route to the service'); taken for no, and asked again; said once"
    ) == 1
    (step,) = steps(tmp_path)
    assert ckptlib.load(tmp_path, loaded := {"w": torch.ones(3)}).step == step
    assert loaded["w"].tolist() == [step] * 3


def test_a_job_that_came_to_its_end_is_done(tmp_path: Path) -> None:
    """Also where it was told to stop at its last step."""
    state = {"w": torch.zeros(3)}
    with ckptlib.Checkpointer(tmp_path, state, every=10**9) as ckpt:
        for step in ckpt.loop(0, 8):
            if step == 6:
                os.kill(os.getpid(), signal.SIGTERM)
        assert ckpt.stopping
    assert steps(tmp_path) == [8]


def test_nobody_is_left_before_all_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another Checkpointer of the process may be open, with the thread that leaves: a close may take its time."""
    excused, close = [], Session.close

    def closed(session: Session, timeout: timedelta, clean: bool) -> None:
        excused.append(stop_signal._handler._may_stand_still())
        close(session, timeout, clean)

    monkeypatch.setattr(Session, "close", closed)
    with ckptlib.Checkpointer(tmp_path, {"w": torch.zeros(3)}, every=1) as ckpt:
        ckpt.after_step(1)
    assert excused == [True]
    assert not stop_signal._handler._may_stand_still()


@pytest.mark.parametrize("first", ["open", "dropped", "closed"])
def test_the_second_checkpointer_of_a_process_hears_it(tmp_path: Path, first: str) -> None:
    """Whatever becomes of the first one, as where its training raised, and the program began another."""
    state = {"w": torch.zeros(3)}
    made = [ckptlib.Checkpointer(tmp_path / "first", state, every=10**9)]

    def train() -> None:
        with ckptlib.Checkpointer(tmp_path / "second", state, every=10**9) as ckpt:
            for step in ckpt.loop(0, 8):
                if step == 1 and first != "open":
                    made.pop().close() if first == "closed" else made.clear()
                if step == 2:
                    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
                    os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(ckptlib.Preempted):
        train()
    for checkpointer in made:
        checkpointer.close()
    assert steps(tmp_path / "second") == [4]
    gc.collect()  # one that was dropped goes when Python gets to it
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_state_that_is_refused_leaves_signals_alone(tmp_path: Path) -> None:
    """Else nobody would hear SIGTERM in a program that catches the error and goes on without checkpoints."""
    with pytest.raises(ckptlib.UnsupportedState):
        ckptlib.Checkpointer(tmp_path, {"what": object()}, every=1)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == [signal.SIG_DFL] * 2
    assert signal.set_wakeup_fd(-1) == -1


def test_signals_that_others_are_woken_by(tmp_path: Path) -> None:
    """Such as asyncio: theirs stays, and the job hears them all the same."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes)

    def train() -> None:
        with ckptlib.Checkpointer(tmp_path, {"w": torch.zeros(3)}, every=10**9) as ckpt:
            for step in ckpt.loop(0, 8):
                if step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)

    try:
        with pytest.raises(ckptlib.Preempted):
            train()
        assert signal.SIGTERM in os.read(reads, 10)  # and SIGCHLD, where a data loader had workers in this process
    finally:
        assert signal.set_wakeup_fd(before) == writes
        os.close(reads)
        os.close(writes)
    assert steps(tmp_path) == [4]
