"""The examples do what they say: a run that was stopped or killed ends with the bits of one that was not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import forked
from places import ROOT

from ckptlib.errors import EXIT_PREEMPTED

EXAMPLES = ROOT / "examples"
STEPS = 12
BATCH = 4
STOP_AT = 5
"""The step in whose body the last rank is told to stop."""

# The trainer as it is, but for one rank that gets a SIGTERM in the middle of a certain step.
STOPPED = f"""
import itertools, os, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_gpt

forward, steps = train_gpt.GPT.forward, itertools.count()

def stopped(self, x, y):
    last = int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1
    if next(steps) == {STOP_AT} and last:
        os.kill(os.getpid(), signal.SIGTERM)
    return forward(self, x, y)

train_gpt.GPT.forward = stopped
train_gpt.main()
"""


class Run:
    """One training job with a directory of its own, started any number of times."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.root, self.losses_file, self.final_file = (directory / name for name in ("root", "losses", "final"))

    def start(self, ranks: int, parallel: str, script: Path = EXAMPLES / "train_gpt.py") -> str:
        """As a person starts it. Returns what it printed."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        command = [sys.executable, *launcher, script, *self.flags(parallel)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def fork(self, ranks: int, parallel: str, script: Path = EXAMPLES / "train_gpt.py", status: int = 0) -> str:
        """The same, sooner."""
        codes, output = forked(script, ranks, *self.flags(parallel), timeout_s=100)
        assert codes == [status] * ranks, output
        return output

    def flags(self, parallel: str) -> list[str]:
        sizes = f"--steps {STEPS} --every 3 --layers 1 --width 32 --heads 2 --context 32 --batch {BATCH}".split()
        files = [f"--root={self.root}", f"--losses={self.losses_file}", f"--final={self.final_file}"]
        return ["--parallel", parallel, *sizes, *files]

    def losses(self) -> list[tuple[int, str]]:
        lines = [json.loads(line) for line in self.losses_file.read_text().splitlines()]
        return [(line["step"], line["loss"]) for line in lines]

    def final(self) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.final_file.read_text())
        return found


def environment() -> dict[str, str]:
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in outer} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    return script


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ranks", "parallel"), [(1, "none"), (2, "ddp")])
def test_stopped_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, stopped: Path, ranks: int, parallel: str
) -> None:
    whole, parted = Run(tmp_path / "whole"), Run(tmp_path / "parted")
    whole.fork(ranks, parallel)

    assert "run the same command again" in parted.fork(ranks, parallel, stopped, EXIT_PREEMPTED)
    reached = len(parted.losses())
    assert STOP_AT < reached < STEPS
    assert not parted.final_file.exists()
    parted.start(ranks, parallel)

    assert whole.losses() == parted.losses()  # the stop was saved: no step was repeated
    assert [step for step, _ in whole.losses()] == list(range(STEPS))
    assert whole.final() == parted.final()


@pytest.mark.timeout(240)
def test_another_number_of_ranks_goes_on_with_the_same_data(tmp_path: Path, stopped: Path) -> None:
    run = Run(tmp_path / "run")
    run.fork(2, "fsdp", stopped, EXIT_PREEMPTED)
    assert len(run.losses()) < STEPS
    run.fork(1, "none")
    assert [step for step, _ in run.losses()] == list(range(STEPS))
    (place,) = run.final()["place in the data"]  # type: ignore[misc]
    assert (place["epoch"], place["consumed"]) == (0, STEPS * BATCH)


@pytest.mark.timeout(240)
def test_demo() -> None:
    """It compares by itself; every difference makes it fail."""
    command = [sys.executable, EXAMPLES / "demo.py", "--quick"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
