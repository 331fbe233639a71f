"""What do saves cost with `every=Overhead(...)`? Measured against the same loop without them, for three budgets.

Two ranks, one thread each. Blocks take turns in the same processes: whole intervals with saves, from the step after one
save to the one at whose end another begins, and as many steps without `after_step`. Each turn gives one figure of the
overhead, so a machine that others use beside it shows in the quartiles, and in those of the steps without saves.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import ckptlib
from benchmarks.common import tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.slowdown import Training


class Workload(NamedTuple):
    step_s: float
    times: int = 1
    """How much is saved, as a multiple of the option --gb."""
    query: str = ""
    """Of a store that is slower than the disk."""

    def url(self, directory: Path) -> str:
        return f"latency+file://{directory}{self.query}" if self.query else str(directory)


BUDGETS = (0.01, 0.035, 0.05)
WORKLOADS = {
    "light": Workload(0.2),
    "heavy": Workload(0.5, times=5),
    "slow store": Workload(0.2, query="?latency=0.005&bandwidth=4e6"),
}
SETTLE = 12
"""Saves before the first turn: the tuner comes down from its first interval by halves."""
LEAST_S = 3.0
"""Of a block: whole intervals, but not shorter."""
PRODUCT_WIDTH = 128
"""Steps are of products that stay in a core's cache: those of larger ones vary by more than any budget."""
MOST_STEPS, PATIENCE_S = 3000, 60.0
"""A save must come in so many steps, or as long as that takes: on a busy machine, short steps overtake a writer."""


def main(arguments: list[str]) -> None:
    run(arguments, "overhead", measure, gb=0.02, rounds=6)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    num_ranks = 1 if options.toy else 2
    workloads, budgets = ({"toy": Workload(0.01)}, (0.5,)) if options.toy else (WORKLOADS, BUDGETS)
    for (name, workload), budget in itertools.product(workloads.items(), budgets):
        case = f"{name}, budget {budget:.1%}"
        order = {
            "nbytes": 1_000_000 if options.toy else int(options.gb * 1e9) * workload.times,
            "step_s": workload.step_s,
            "turns": 1 if options.toy else options.rounds,
            "settle": 1 if options.toy else SETTLE,
            "budget": budget,
            "url": workload.url(directory / f"{name}-{budget}".replace(" ", "-")),
        }
        for line in figures.attempt(case, "ckptlib", __name__, num_ranks, order, options.timeout_s):
            if line["rank"] == 0:
                figures.add(case, "ckptlib", line["what"], line["unit"], line["samples"])


# In the ranks


class Loop:
    """A training that saves, and that can be stopped in the middle to go on without."""

    def __init__(self, training: Training, saver: ckptlib.Checkpointer) -> None:
        self._training, self._saver = training, saver
        self._step = 0
        self.saves = 0
        """That have begun."""

    def _next(self) -> bool:
        """One step. Returns whether a save began."""
        before = self._saver.pending
        self._training.step()
        self._step += 1
        self._saver.after_step(self._step)
        self.saves += self._saver.pending is not before
        return self._saver.pending is not before

    def until_save(self, least: int = 1, most: float = math.inf) -> int:
        """Trains until a save begins, for `least` steps or more; returns for how many. `most`: without a save, too."""
        deadline = time.monotonic() + PATIENCE_S
        for number in itertools.count(1):
            if (self._next() and number >= least) or number >= most:
                return number
            if number >= MOST_STEPS and time.monotonic() > deadline:
                break
        raise RuntimeError(f"no save began in {number} steps: every {self._saver.interval} one would")

    def rest(self, most: float = math.inf) -> int:
        """Trains until nothing is written and committed on any rank, or for `most` steps; returns for how many."""
        busy, number, session = torch.ones(1), 0, self._saver._session
        while busy.item() and number < most:
            self._next()
            number += 1
            busy[0] = float(session.snapshots.persisting or session.writer.finishes)
            dist.all_reduce(busy, dist.ReduceOp.MAX)
        return number


def work() -> None:
    """Turns of whole intervals with saves, and of as many steps without."""
    given = told()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(given["nbytes"], given["step_s"], PRODUCT_WIDTH)
    overheads, bare, intervals = [], [], []
    state = {"model": training.model, "optim": training.optimizer}
    every = ckptlib.Overhead(at_most=given["budget"])
    with ckptlib.Checkpointer(given["url"], state, every=every, codec="raw", keep=ckptlib.Keep(last=2)) as saver:
        loop = Loop(training, saver)
        for _ in range(given["settle"]):
            loop.until_save()
        for _ in range(given["turns"]):
            began = time.perf_counter()
            num_steps = loop.until_save(least=math.ceil(LEAST_S / given["step_s"]))
            with_saves = (time.perf_counter() - began) / num_steps
            intervals.append(saver.interval)
            loop.rest()
            began = time.perf_counter()
            for _ in range(num_steps):
                training.step()
            without = (time.perf_counter() - began) / num_steps
            bare.append(without)
            overheads.append(with_saves / without - 1)
            loop.until_save()
        account = saver._turns.tuning._kinds.store.account
        tell(what="overhead", unit="1", samples=overheads)
        tell(what="overhead of all turns together", unit="1", samples=[statistics.fmean(overheads)])
        tell(what="interval", unit="steps", samples=intervals)
        tell(what="step without saves", unit="s", samples=bare)
        assert account is not None
        estimate = account.tuner.estimate
        assert estimate is not None
        tell(what="cost of a save, as measured by the tuner", unit="s", samples=[estimate.save_s])
    dist.destroy_process_group()


if __name__ == "__main__":
    work()
