"""Two ranks that keep to an overhead while a hog comes and leaves; forked: hog_job.py <directory> <case>.

What the hog does to rank 1 is counted in steps, so it is the same on any machine: it stops the writer, lets it go on
with a save so many steps after that began, and makes each step until then so many times as long. Each rank tells, as
JSON: the steps whose state was saved, the interval in force after each step, and the steps that were made longer.
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


class Case(NamedTuple):
    held: int
    """Steps for which the writer is stopped in each save."""
    times: int
    """How long such a step is, in steps without the hog."""


CASES = {"disk": Case(held=60, times=1), "core": Case(held=12, times=4)}
BUDGET = 0.6
COMES, LEAVES, ENDS = 10, 16, 22
"""With which save it comes, and with which it is gone; and how many there are."""
STEP_S = 0.006


class Hog:
    """On one rank."""

    def __init__(self, ckpt: ckptlib.Checkpointer, case: Case) -> None:
        self._case, self._session = case, ckpt._session
        self._save: str | None = None
        """The oldest one that is not written, and since which step."""
        self._since = 0
        self._stopped = False

    def look(self, step: int) -> int:
        """After a step: stops the writer, or lets it go on. Returns how long the next step is."""
        save = next(iter(self._session.snapshots.persisting_saves), None)
        if save != self._save:
            self._save, self._since = save, step
        held = save is None or step - self._since < self._case.held
        if held != self._stopped:
            self._stopped = held
            if held:
                stop(self._session.writer.pid)
            else:
                self.leave()
        return 1 if save is None else self._case.times

    def leave(self) -> None:
        self._stopped = False
        os.kill(self._session.writer.pid, signal.SIGCONT)


def train(
    ckpt: ckptlib.Checkpointer, model: torch.nn.Module, optimizer: torch.optim.Optimizer, hog: Hog | None
) -> dict[str, list[int]]:
    saved, intervals, longer = list[int](), list[int](), list[int]()
    step, times = 0, 1
    while len(saved) < ENDS:
        step += 1
        for _ in range(times):
            time.sleep(STEP_S)
            optimizer.zero_grad()
            model(torch.ones(8, 64)).pow(2).mean().backward()
        optimizer.step()
        if times > 1:
            longer.append(step)
        before = ckpt.pending
        ckpt.after_step(step)
        intervals.append(ckpt.interval)
        if ckpt.pending is not before:
            saved.append(step)
        times = 1
        if hog is not None and COMES <= len(saved) < LEAVES:
            times = hog.look(step)
        elif hog is not None and len(saved) == LEAVES:
            hog.leave()
    return {"saved": saved, "intervals": intervals, "longer": longer}


def main(directory: Path, case: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state, every = {"model": model, "optim": optimizer}, ckptlib.Overhead(BUDGET)
    with ckptlib.Checkpointer(str(directory / "root"), state, every=every) as ckpt:
        hog = Hog(ckpt, CASES[case]) if rank == 1 else None
        try:
            told = train(ckpt, model, optimizer, hog)
        finally:
            if hog is not None:
                hog.leave()
    (directory / f"{case}.rank{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
