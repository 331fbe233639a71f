"""Jobs that are killed at exponential times: nothing of the result is lost, and goodput says what the time went on.

The oracle is a log that the job and whoever kills it keep by their own clock.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from helpers.forkserver import context, start_server
from workers.killed_often import STEP_S, train

from ckptlib.catalog.accounts import MAX_OBJECTS

EVERY = 10


@dataclass
class Told:
    """What the log says; seconds."""

    kept: float = 0.0
    lost: float = 0.0
    restoring: float = 0.0
    closing: float = 0.0
    down: float = 0.0
    kills: int = 0
    firsts: list[int] = field(default_factory=list)
    steps_lost: int = 0

    @property
    def lost_or_down(self) -> float:
        return self.lost + self.down

    @property
    def total(self) -> float:
        return self.kept + self.lost + self.restoring + self.closing + self.down


def read(log: Path) -> Told:
    """Of each start its lines; then, from the last start to the first, which of its steps the next one did again."""
    starts: list[list[tuple[str, int, float]]] = []
    for line in log.read_text(encoding="ascii").splitlines():
        what, step, at = line.split()
        if what == "begins":
            starts.append([])
        starts[-1].append((what, int(step), float(at)))
    told = Told()
    for n, lines in enumerate(starts):
        began = lines[0][2]
        if n:
            told.down += began - starts[n - 1][-1][2]
        at = {what: (step, when) for what, step, when in lines if what != "step"}
        first, restored = at["restored"]
        told.restoring += restored - began
        told.firsts.append(first)
        reached = {step: when for what, step, when in lines if what == "step"}
        reached[first] = restored
        later = [other[1][1] for other in starts[n + 1 :]]
        limit = min([max(reached), *later])
        told.kept += reached[max(limit, first)] - restored
        told.steps_lost += max(reached) - max(limit, first)
        if "killed" in at:
            told.kills += 1
            told.lost += at["killed"][1] - reached[max(limit, first)]
        else:
            told.closing += at["ended"][1] - reached[max(reached)]
    return told


def run_killed(tmp_path: Path, steps: int, mtbf: float, seed: int, log: Path) -> None:
    """Starts the job until it ends; kills it, in the mean, after `mtbf` iterations."""
    draw = random.Random(seed)
    start_server()
    for _ in range(1000):
        job = context.Process(
            target=train,
            args=(str(tmp_path / "root"), str(tmp_path / "arena"), str(log), steps, EVERY, str(tmp_path / "result")),
        )
        job.start()
        told = log.read_text(encoding="ascii").count("restored") if log.exists() else 0
        while job.is_alive() and (not log.exists() or log.read_text(encoding="ascii").count("restored") == told):
            time.sleep(0.002)
        job.join(draw.expovariate(1 / (mtbf * STEP_S)))
        if f"step {steps} " in log.read_text(encoding="ascii"):  # all that is left is to wait for the last commit
            job.join(120)
        if job.exitcode is None:
            job.kill()
            job.join()
            with log.open("a", encoding="ascii") as lines:
                lines.write(f"killed 0 {time.time():.6f}\n")
        elif job.exitcode == 0:
            return
        else:
            pytest.fail(f"the job failed with {job.exitcode}")
    pytest.fail("the job does not come to its end")


def undisturbed(tmp_path: Path, steps: int) -> list[torch.Tensor]:
    (tmp_path / "calm").mkdir()
    start_server()
    names = [str(tmp_path / "calm" / name) for name in ("root", "arena", "log")]
    (tmp_path / "calm" / "arena").mkdir()
    job = context.Process(target=train, args=(*names, steps, EVERY, str(tmp_path / "calm" / "result")))
    job.start()
    job.join(300)
    return torch.load(tmp_path / "calm" / "result", weights_only=True)


def check(tmp_path: Path, steps: int, mtbf: float, seed: int) -> dict[str, float]:
    (tmp_path / "arena").mkdir()
    log = tmp_path / "log"
    run_killed(tmp_path, steps, mtbf, seed, log)
    expected = undisturbed(tmp_path, steps)
    got = torch.load(tmp_path / "result", weights_only=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))

    told = read(log)
    command = [sys.executable, "-m", "ckptlib.cli", "goodput", str(tmp_path / "root"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(json.dumps({"told": vars(told) | {"firsts": len(told.firsts)}, "found": found | {"starts": 0}}, indent=1))
    seconds, total = found["seconds"], told.total
    assert total == pytest.approx(seconds["total"], rel=0.05, abs=0.1 * len(told.firsts))
    assert [start["first"] for start in found["starts"] if start["first"] is not None] == [
        first for first, start in zip(told.firsts, found["starts"], strict=True) if start["first"] is not None
    ]
    assert found["failures"] == told.kills
    assert abs(sum(start["steps_lost"] for start in found["starts"]) - told.steps_lost) <= len(told.firsts)
    for name, value in (
        ("kept", seconds["trained"] + seconds["stalled"]),
        ("restoring", seconds["restoring"]),
        ("lost_or_down", seconds["lost"] + seconds["down"]),  # a kill before the writer ran: it knows no time of death
        ("closing", seconds["closing"]),
    ):
        assert value == pytest.approx(getattr(told, name), rel=0.05, abs=0.05 * total), name
    assert len([*(tmp_path / "root" / "generations").glob("*.account")]) <= MAX_OBJECTS + 2
    return found


@pytest.mark.slow
def test_a_job_that_is_killed_some_times(tmp_path: Path) -> None:
    check(tmp_path, steps=150, mtbf=60, seed=3)


@pytest.mark.slow  # thousands of steps, and some tens of restarts
@pytest.mark.parametrize(("mtbf", "points"), [(100, 8), (300, 2)])
def test_kills_at_exponential_times(tmp_path: Path, mtbf: int, points: int) -> None:
    """On two quiet cores 0.3 points at 100 and 0.1 at 300. Where a failure comes every few saves, saves that are late
    count: 3.4 and 6.2 points at 100 under a load of 25 to 35."""
    found = check(tmp_path, steps=2000, mtbf=mtbf, seed=mtbf)
    assert found["failures"] >= 5
    assert abs(found["ettr"] - found["ettr_predicted"]) <= points / 100
