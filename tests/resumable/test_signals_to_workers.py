"""A scheduler's warning that goes to all processes of a job, as Slurm's does: the workers of a data loader outlast it,
so the trainer saves."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import Program, environment
from places import WORKERS

import ckptlib
from ckptlib.data import outlast_signals
from ckptlib.errors import EXIT_PREEMPTED
from ckptlib.policy.stop_signal import TOLD_BY

pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")


def fork(directory: Path, kind: str) -> Program:
    """A trainer whose workers are forked, too."""
    return Program(WORKERS / "signalled_workers.py", directory / "root", kind, "fork", log=directory / "log")


def start(root: Path, kind: str, context: str) -> subprocess.Popen[str]:
    """In a process group of its own, with its workers; the writer has another one."""
    command = [sys.executable, str(WORKERS / "signalled_workers.py"), str(root), kind, context]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(), start_new_session=True)


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("ours", signal.SIGTERM),
        ("stateful", signal.SIGUSR1),
        pytest.param("stateful", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_the_trainer_saves(tmp_path: Path, kind: str, number: int) -> None:
    with fork(tmp_path, kind) as job:
        job.wait_for("training")
        os.killpg(job.pid, number)
        assert job.wait(120) == EXIT_PREEMPTED, job.printed()
    assert_saved(tmp_path / "root")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGUSR1, marks=pytest.mark.slow)])
def test_the_trainer_of_spawned_workers_saves(tmp_path: Path, number: int) -> None:
    job = start(tmp_path / "root", "ours", "spawn")
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "training\n"
        os.killpg(job.pid, number)
        _, said = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == EXIT_PREEMPTED, said
    assert_saved(tmp_path / "root")


def assert_saved(root: Path) -> None:
    (step,) = (info.step for info in ckptlib.checkpoints(root))
    assert step > 10


def test_a_launcher_passes_the_signal_on(tmp_path: Path) -> None:
    """As torchrun does, to the process groups of its ranks, where a scheduler has told all processes already."""
    with fork(tmp_path, "ours") as job:
        job.wait_for("training")
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        workers = [int(pid) for pid in children if os.getpgid(int(pid)) == job.pid]
        assert len(workers) == 2
        for _ in range(2):
            for worker in workers:
                os.kill(worker, signal.SIGTERM)
            time.sleep(0.2)  # else the kernel may make one of both
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(120) == EXIT_PREEMPTED, job.printed()


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        ("ending", "fork"),
        ("hanging", "fork"),
        ("ending", "forkserver"),
        pytest.param("ending", "spawn", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_that_ends_ends_them(tmp_path: Path, kind: str, context: str) -> None:
    """And others of its processes; also where the loader was given a `worker_init_fn` when it was ours already."""
    job = start(tmp_path / "root", kind, context)
    try:
        told, said = job.communicate(timeout=150)  # a worker that nobody ends does so after ten minutes, or never
    finally:
        job.kill()
    assert (job.returncode, told) == (0, "training\nended\n"), said


def test_a_worker_that_the_trainer_would_not_know_has_no_other_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: multiprocessing ends it by SIGTERM, and waits for that."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: multiprocessing.current_process())
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # no function that is asked for
    before = [signal.getsignal(number) for number in TOLD_BY]
    outlast_signals(0)
    assert [signal.getsignal(number) for number in TOLD_BY] == before
