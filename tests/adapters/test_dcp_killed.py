"""A job that saves the same checkpoint again and again, killed at random moments: there is always a whole one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers.registry import close_sessions
from launch import environment
from places import ROOT

from ckptlib import dcp

JOB = """
import sys, torch
from ckptlib import dcp
n = int(sys.argv[2])
while True:
    dcp.save({"w": torch.full((200_000,), float(n)), "n": n}, checkpoint_id=sys.argv[1])
    n += 1
    print(n, flush=True)
"""


@pytest.mark.parametrize("name", ["step-2", pytest.param("last", marks=pytest.mark.slow)])
def test_killed_while_it_replaces(tmp_path: Path, name: str) -> None:
    """`step-2` begins a new generation each time; `last` is the newest of one."""
    draw, saved = random.Random(name), 0
    for _ in range(4):
        command = [sys.executable, "-c", JOB, str(tmp_path / name), str(saved)]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT)
        assert job.stdout is not None
        saved = int(job.stdout.readline())  # one is committed, so every load finds one from now on
        time.sleep(draw.uniform(0, 0.5))
        os.kill(job.pid, signal.SIGKILL)
        rest = job.stdout.read().split()
        job.wait()
        saved = int(rest[-1]) if rest else saved
        state = {"w": torch.empty(200_000), "n": -1}
        dcp.load(state, checkpoint_id=tmp_path / name)
        n = int(state["n"])  # type: ignore[call-overload]
        assert n >= saved - 1, "what save had returned for is there, or a later one that was in flight"
        assert state["w"].eq(n).all()  # type: ignore[attr-defined]
    close_sessions()
