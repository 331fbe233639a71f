"""Two ranks that keep to an overhead while a hog comes and leaves; forked: hog_job.py <directory> <case>.

What the tuner takes for the time is a count of steps, so that this comes out alike on any machine, however busy. A save
takes so many steps: both writers are told of it only then, and the step after that waits for it. A hog makes them more,
and on rank 1 each step beside a save so many times as long. Each rank tells, as JSON: the steps whose state was saved,
the interval in force after each step, and the steps that were made longer.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import ckptlib
from ckptlib.saving import profile, turns
from ckptlib.staging import fence


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
    """Of both ranks: their writers are told of a snapshot only when the save is to come to its end."""

    def __init__(self, ckpt: ckptlib.Checkpointer, rank: int) -> None:
        self._rank = rank
        writer = ckpt._session.writer
        self._tell = writer.persist
        self._told = SimpleQueue[tuple[Any, ...]]()
        """What the writer is yet to be told, by the staging thread."""
        writer.persist = lambda *order: self._told.put(order)  # type: ignore[method-assign]
        self._saves: list[ckptlib.Pending] = []
        """Those that are not written, oldest first."""
        self._since = 0
        """When the oldest became that."""

    def look(self, step: int, begun: ckptlib.Pending | None, case: Case) -> int:
        """After a step, with which a save may have begun. Returns how long the next step is."""
        if begun is not None:
            self._since = self._since if self._saves else step
            self._saves.append(begun)
        if self._saves and step - self._since >= case.held:
            self._write()
            self._since = step
        return case.times if self._saves and self._rank == 1 else 1

    def finish(self) -> None:
        while self._saves:
            self._write()

    def _write(self) -> None:
        """The oldest."""
        self._tell(*self._told.get(timeout=PATIENCE_S))
        self._saves.pop(0).wait_committed(PATIENCE_S)


def train(
    ckpt: ckptlib.Checkpointer, model: torch.nn.Module, optimizer: torch.optim.Optimizer, disk: Disk, hog: Case
) -> dict[str, list[int]]:
    clock = StepClock()
    profile.time = turns.time = fence.time = clock  # type: ignore[assignment]
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
        times = disk.look(step, begun, hog if COMES <= len(saved) < LEAVES else ALONE)
    disk.finish()
    return {"saved": saved, "intervals": intervals, "longer": longer}


def main(directory: Path, case: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state, every = {"model": model, "optim": optimizer}, ckptlib.Overhead(BUDGET)
    with ckptlib.Checkpointer(str(directory / "root"), state, every=every) as ckpt:
        told = train(ckpt, model, optimizer, Disk(ckpt, rank), CASES[case])
    (directory / f"{case}.rank{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
