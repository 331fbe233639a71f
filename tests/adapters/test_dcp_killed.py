"""A job that saves the same checkpoint again and again, killed at random moments: there is always a whole one."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.registry import close_sessions
from workers import crash_jobs
from workers.crash_jobs import start
from workers.dcp_replaced import replace_for_ever

from ckptlib import dcp


@pytest.fixture(autouse=True)
def _ended(tmp_path: Path) -> Iterator[None]:
    yield
    crash_jobs.end_all(tmp_path)


@pytest.mark.parametrize("name", ["step-2", pytest.param("last", marks=pytest.mark.slow)])
def test_killed_while_it_replaces(tmp_path: Path, name: str) -> None:
    """`step-2` begins a new generation each time; `last` is the newest of one."""
    draw, saved = random.Random(name), 0
    for _ in range(4):
        (job,) = start(replace_for_ever, tmp_path, where=str(tmp_path / "of" / name), saved=saved)
        job.wait_for("saved")  # one is committed, so every load finds one from now on
        time.sleep(draw.uniform(0, 0.5))
        job.kill()
        assert job.join() == -signal.SIGKILL
        saved = job.told()[-1]["number"]
        state = {"w": torch.empty(200_000), "n": -1}
        dcp.load(state, checkpoint_id=tmp_path / "of" / name)
        n = int(state["n"])  # type: ignore[call-overload]
        assert n >= saved - 1, "what save had returned for is there, or a later one that was in flight"
        assert state["w"].eq(n).all()  # type: ignore[attr-defined]
    close_sessions()
