"""Two ranks that keep to an overhead while a hog comes and leaves; forked: hog_job.py <directory> <case>.

What the tuner takes for the time is a count of steps, so that this comes out alike on any machine, however busy. On
rank 1, a save takes so many steps: its writer is stopped until then, and the step after that waits for it. A hog makes
them more, and each step beside a save so many times as long. Each rank tells, as JSON: the steps whose state was saved,
the interval in force after each step, and the steps that were made longer.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from helpers.writers import stop

import ckptlib
from ckptlib.saving import profile, turns


class Case(NamedTuple):
    held: int
    """Steps that a save takes."""
    times: int
    """How long such a step is, in steps without a hog."""


ALONE = Case(held=3, times=1)
CASES = {"disk": Case(held=60, times=1), "core": Case(held=12, times=4)}
BUDGET = 0.6
COMES, LEAVES, ENDS = 10, 16, 22
"""With which save it comes, and with which it is gone; and how many there are."""
PATIENCE_S = 60.0


class StepClock:
    """Counts steps. Whoever asks takes a thousandth of one."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.steps = 0.0

    def perf_counter(self) -> float:
        self.steps += 0.001
        return self.steps


class Disk:
    """Of rank 1."""

    def __init__(self, ckpt: ckptlib.Checkpointer) -> None:
        self._session = ckpt._session
        self._saves: list[ckptlib.Pending] = []
        """Those that are not written, oldest first."""
        self._since = 0
        """When the oldest became that."""

    def look(self, step: int, begun: ckptlib.Pending | None, case: Case) -> int:
        """After a step, with which a save may have begun. Returns how long the next step is."""
        if begun is not None:
            self._since = self._since if self._saves else step
            self._saves.append(begun)
            stop(self._session.writer.pid)
        if self._saves and step - self._since >= case.held:
            self.let_go()
            self._saves.pop(0).wait_committed(PATIENCE_S)
            self._since = step
            if self._saves:
                stop(self._session.writer.pid)
        return case.times if self._saves else 1

    def let_go(self) -> None:
        os.kill(self._session.writer.pid, signal.SIGCONT)


def train(
    ckpt: ckptlib.Checkpointer, model: torch.nn.Module, optimizer: torch.optim.Optimizer, disk: Disk | None, hog: Case
) -> dict[str, list[int]]:
    clock = StepClock()
    profile.time = turns.time = clock  # type: ignore[assignment]
    saved, intervals, longer = list[int](), list[int](), list[int]()
    step, times = 0, 1
    while len(saved) < ENDS:
        step += 1
        optimizer.zero_grad()
        model(torch.ones(8, 64)).pow(2).mean().backward()
        optimizer.step()
        clock.steps += times
        if times > 1:
            longer.append(step)
        before = ckpt.pending
        ckpt.after_step(step)
        intervals.append(ckpt.interval)
        begun = None if ckpt.pending is before else ckpt.pending
        if begun is not None:
            saved.append(step)
        if disk is not None:
            times = disk.look(step, begun, hog if COMES <= len(saved) < LEAVES else ALONE)
    return {"saved": saved, "intervals": intervals, "longer": longer}


def main(directory: Path, case: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state, every = {"model": model, "optim": optimizer}, ckptlib.Overhead(BUDGET)
    with ckptlib.Checkpointer(str(directory / "root"), state, every=every) as ckpt:
        disk = Disk(ckpt) if rank == 1 else None
        try:
            told = train(ckpt, model, optimizer, disk, CASES[case])
        finally:
            if disk is not None:
                disk.let_go()
    (directory / f"{case}.rank{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
