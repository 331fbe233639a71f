"""A root with a history: a kill, a slow store, a save that fails, a rewind, a host that is lost, and a new interval."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

from helpers.forkserver import context, start_server
from workers.reported_run import train

from ckptlib.stores.testing import write_plan

EVERY = 5
SLOW_S = 0.8
"""That a put of packs takes while the store is slow."""


def make_run(directory: Path) -> Path:
    """The root. Of steps: 1 to 17 (killed), from 15 on to 42 (slow, then one save fails), back to 25 by a rewind, on to
    43 (lost with its host), from 40 on to 70, with Overhead."""
    root, plan = directory / "root", directory / "plan.json"
    write_plan(plan, [])
    url = f"fault+file://{root}?plan={plan}"

    def start(last: int, every: int | None, end: str, code: int) -> None:
        arena = directory / "arena"
        arena.mkdir(exist_ok=True)
        job = context.Process(target=train, args=(url, str(arena), last, every, end))
        job.start()
        job.join(300)
        if job.exitcode is None:
            job.kill()
        assert job.exitcode == code, job.exitcode

    start_server()
    start(17, EVERY, "killed", -signal.SIGKILL)
    slow = {"op": "commit", "key": "packs/0{9,}(2[05]|30)", "action": "stall", "seconds": SLOW_S}
    fails = {"op": "commit", "key": "packs/0{9,}35", "action": "full"}
    write_plan(plan, [slow, fails])
    start(42, EVERY, "closed", 0)
    write_plan(plan, [])
    command = [sys.executable, "-m", "ckptlib.cli", "rewind", str(root), "25", "--yes"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    start(43, EVERY, "lost", -signal.SIGKILL)
    shutil.rmtree(directory / "arena")
    start(70, None, "closed", 0)
    return root
