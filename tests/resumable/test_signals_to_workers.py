"""A scheduler's warning that goes to all processes of a job, as Slurm's does: the workers of a data loader outlast it,
so the trainer saves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch import environment
from places import WORKERS

import ckptlib
from ckptlib.errors import EXIT_PREEMPTED

pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")


def start(root: Path, kind: str, context: str) -> subprocess.Popen[str]:
    """In a process group of its own, with its workers; the writer has another one."""
    command = [sys.executable, str(WORKERS / "signalled_workers.py"), str(root), kind, context]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment(), start_new_session=True)


@pytest.mark.parametrize(
    ("kind", "context", "number"),
    [
        ("ours", "fork", signal.SIGTERM),
        ("stateful", "fork", signal.SIGUSR1),
        ("ours", "spawn", signal.SIGTERM),
        pytest.param("ours", "spawn", signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param("stateful", "fork", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_the_trainer_saves(tmp_path: Path, kind: str, context: str, number: int) -> None:
    job = start(tmp_path / "root", kind, context)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "training\n"
        os.killpg(job.pid, number)
        _, said = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == EXIT_PREEMPTED, said
    (step,) = (info.step for info in ckptlib.checkpoints(tmp_path / "root"))
    assert step > 10


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        ("ending", "fork"),
        ("held", "fork"),
        ("ending", "forkserver"),
        pytest.param("ending", "spawn", marks=pytest.mark.slow),
    ],
)
def test_a_trainer_that_ends_ends_them(tmp_path: Path, kind: str, context: str) -> None:
    """And others of its processes; also where the loader was given a `worker_init_fn` when it was ours already."""
    job = start(tmp_path / "root", kind, context)
    try:
        told, said = job.communicate(timeout=50)  # a worker that nobody ends does so after a minute
    finally:
        job.kill()
    assert (job.returncode, told) == (0, "training\nended\n"), said
