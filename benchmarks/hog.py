"""A hog takes a core or the disk, and leaves, time and again: is a budget kept, and what do other rules make of it?

Two ranks, one thread each, train free of it and beside a process that spins on a core, or one that writes to the disk
of the checkpoints and syncs it. Three rules take turns, each for the same number of steps in each phase: ours;
CheckFreq's, which only raises the interval, from the one that we have found when the first phase begins; and the fixed
interval at which the saves would have cost as much in all as ours did, which nobody knows before. Whole intervals take
turns with as many steps without `after_step`, in the same processes and beside the same hog.

One such segment says little: two of a row differ by as much as the whole budget. So the hog comes several times, and
what counts is all that follows the first ANSWERS saves of each phase.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from typing_extensions import override

import ckptlib
from benchmarks.common import Line, tell, told
from benchmarks.figures import Figures, Options, run
from benchmarks.overhead import PRODUCT_WIDTH, Loop
from benchmarks.slowdown import Training
from ckptlib.policy.when import Moment

OURS, ONLY_UP, FIXED = "ckptlib", "only up, as CheckFreq", "fixed interval"
BUDGET, STEP_S = 0.035, 0.1
SETTLE = 12
"""Saves before the first phase."""
BEFORE, BESIDE, AFTER = "before", "beside", "after"
ANSWERS = 5
"""Saves after which the budget should be kept again, and the interval be as it was."""
SAVES = 12
"""Of ours in a phase, at least; the other rules get as many steps as these took."""
PHASE_S, SEGMENT_S = 30.0, 2.0
"""Of training in a phase, and in a segment, at least."""
MOST_S = 200.0
"""Of training in a phase: an interval that never comes down is told all the same."""

HOGS = {
    "core": "while True: pass",
    "disk": """
import os, sys
data = os.urandom(16 << 20)
with open(sys.argv[1], "wb", buffering=0) as file:
    while True:
        file.seek(0)
        for _ in range(8):
            file.write(data)
        os.fsync(file)
""",
}


def main(arguments: list[str]) -> None:
    run(arguments, "hog", measure, gb=0.02, rounds=4)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    """`options.rounds`: how often the hog comes."""
    for hog in HOGS:
        _compare(options, directory / hog, hog, figures)


def _compare(options: Options, directory: Path, hog: str, figures: Figures) -> None:
    """One turn of each rule."""
    times = 1 if options.toy else options.rounds
    order: Line = {
        "hog": hog,
        "nbytes": 1_000_000 if options.toy else int(options.gb * 1e9),
        "step_s": 0.005 if options.toy else STEP_S,
        "budget": 0.9 if options.toy else BUDGET,
        "settle": 1 if options.toy else SETTLE,
        "phases": [BEFORE, *[BESIDE, AFTER] * times],
        "saves": ANSWERS + 1 if options.toy else SAVES,
        "phase_s": 0.05 if options.toy else PHASE_S,
        "segment_s": 0.02 if options.toy else SEGMENT_S,
        "most_s": 0.5 if options.toy else MOST_S,
    }
    case, num_ranks = f"hog of the {hog}", 1 if options.toy else 2
    for rule in (OURS, ONLY_UP, FIXED):
        order |= {"rule": rule, "directory": str(directory / rule.replace(" ", "-"))}
        lines = figures.attempt(case, rule, __name__, num_ranks, order, options.timeout_s * times)
        phases = [Phase(**line["found"]) for line in lines if line["rank"] == 0]
        if not phases:
            return
        _add(figures, case, rule, phases)
        if rule == OURS:
            order |= {"steps": [phase.steps for phase in phases], "interval": as_dear(phases)}


@dataclass
class Phase:
    """One rule's, before, beside or after the hog."""

    name: str
    steps: int = 0
    saves: int = 0
    with_s: list[float] = field(default_factory=list)
    """Of each segment: seconds of its steps, and of as many steps without `after_step`."""
    bare_s: list[float] = field(default_factory=list)
    intervals: list[int] = field(default_factory=list)
    """In force after each segment."""
    counts: list[int] = field(default_factory=list)
    """Saves of this phase, by the end of each segment."""
    save_s: float = 0.0
    """What a save cost in the end, as the tuner measured it; 0 where no rank has one."""

    @property
    def first_settled(self) -> int:
        """The first segment that began after ANSWERS saves; the number of segments where none did."""
        return next((n + 1 for n, count in enumerate(self.counts) if count >= ANSWERS), len(self.counts))


def as_dear(phases: Sequence[Phase]) -> int:
    """The fixed interval at which all saves together would have cost what they did."""
    if_each_step = sum(phase.steps * phase.save_s for phase in phases)
    return max(round(if_each_step / sum(phase.saves * phase.save_s for phase in phases)), 1)


def _add(figures: Figures, case: str, rule: str, phases: Sequence[Phase]) -> None:
    for name in dict.fromkeys(phase.name for phase in phases):
        some = [phase for phase in phases if phase.name == name]
        early = [slice(None, phase.first_settled) for phase in some]
        late = [slice(phase.first_settled, None) for phase in some]
        _add_overhead(figures, case, rule, f"{name}, first {ANSWERS} saves", some, early)
        _add_overhead(figures, case, rule, f"{name}, later", some, late)
        for what, cuts in ((f"first {ANSWERS} saves", early), ("later", late)):
            found = [x for phase, cut in zip(some, cuts, strict=True) for x in phase.intervals[cut]]
            figures.add(case, rule, f"interval {name}, {what}", "steps", found)
    everything = [slice(None) for _ in phases]
    _add_overhead(figures, case, rule, "in all", phases, everything)
    saves, steps = sum(phase.saves for phase in phases), sum(phase.steps for phase in phases)
    figures.add(case, rule, "checkpoints in all", "1", [saves], steps=steps)
    figures.add(case, rule, "checkpoints per 1,000 steps", "1", [1000 * saves / steps])


def _add_overhead(
    figures: Figures, case: str, rule: str, what: str, phases: Sequence[Phase], cuts: Sequence[slice]
) -> None:
    """Of segments, all together; and how far off chance alone may put it."""
    with_s = [x for phase, cut in zip(phases, cuts, strict=True) for x in phase.with_s[cut]]
    bare_s = [x for phase, cut in zip(phases, cuts, strict=True) for x in phase.bare_s[cut]]
    if not bare_s:
        return
    figures.add(case, rule, f"overhead {what}", "1", [sum(with_s) / sum(bare_s) - 1])
    ratios = [a / b for a, b in zip(with_s, bare_s, strict=True)]
    if len(ratios) > 1:
        error = statistics.stdev(ratios) / math.sqrt(len(ratios))
        figures.add(case, rule, f"overhead {what}, its standard error", "1", [error], segments=len(ratios))


# In the ranks


@dataclass
class Longest:
    steps: int | None = None
    """None: nothing counts yet."""


@dataclass(frozen=True)
class OnlyUp(ckptlib.Overhead):
    """CheckFreq's rule, which knows one way: up. What it is up from, somebody says by setting `longest`."""

    longest: Longest = field(default_factory=Longest)

    @override
    def due_at(self, moment: Moment) -> bool:
        longest = self.longest
        if longest.steps is not None:
            longest.steps = max(longest.steps, moment.interval or 0)
        return ckptlib.Overhead.due_at(self, moment) and moment.step - moment.saved >= (longest.steps or 0)


def work() -> None:
    """The three phases, under one rule."""
    given = told()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = Training(given["nbytes"], given["step_s"], PRODUCT_WIDTH)
    state = {"model": training.model, "optim": training.optimizer}
    only_up = OnlyUp(at_most=given["budget"])
    rules = {OURS: ckptlib.Overhead(at_most=given["budget"]), ONLY_UP: only_up}
    every = rules.get(given["rule"]) or ckptlib.Steps(given["interval"])
    with ckptlib.Checkpointer(given["directory"], state, every=every, codec="raw", keep=ckptlib.Keep(last=2)) as saver:
        loop = Loop(training, saver)
        for _ in range(given["settle"] if given["rule"] in rules else 1):
            loop.until_save()
        loop.rest()
        if given["rule"] == ONLY_UP:
            only_up.longest.steps = saver.interval
        for number, name in enumerate(given["phases"]):
            spend = None if given["rule"] == OURS else given["steps"][number]
            with hog(given["hog"] if name == BESIDE else None, Path(given["directory"])):
                tell(found=vars(_phase(name, given, spend, loop, training, saver, only_up.longest)))
    dist.destroy_process_group()


@contextmanager
def hog(name: str | None, directory: Path) -> Iterator[None]:
    """A process beside the ranks, on the machine and the disk of the first one; none without a name."""
    if name is None or dist.get_rank():
        yield
        return
    path = directory.with_suffix(".hog")
    process = subprocess.Popen([sys.executable, "-c", HOGS[name], str(path)])
    try:
        yield
    finally:
        process.kill()
        process.wait()
        path.unlink(missing_ok=True)


def _phase(
    name: str,
    given: Line,
    spend: int | None,
    loop: Loop,
    training: Training,
    saver: ckptlib.Checkpointer,
    longest: Longest,
) -> Phase:
    """Segments, each of whole intervals but for the last one of other rules than ours, which have steps to `spend`."""
    found = Phase(name)
    least, most = (math.ceil(given[key] / given["step_s"]) for key in ("segment_s", "most_s"))
    enough = math.ceil(given["phase_s"] / given["step_s"])
    end = most if spend is None else spend
    while found.steps < end and (spend is not None or found.saves < given["saves"] or found.steps < enough):
        began, first = time.perf_counter(), loop.saves
        steps = loop.until_save(least, most=end - found.steps)
        steps += loop.rest(most=end - found.steps - steps)  # a fixed interval may be too short for the disk's hog
        found.with_s.append(time.perf_counter() - began)
        found.steps, found.saves = found.steps + steps, found.saves + loop.saves - first
        found.intervals.append(given["interval"] if given["rule"] == FIXED else max(saver.interval, longest.steps or 0))
        found.counts.append(found.saves)
        began = time.perf_counter()
        for _ in range(steps):
            training.step()
        found.bare_s.append(time.perf_counter() - began)
    account = saver._turns.tuning._kinds.store.account
    if account is not None and account.tuner.estimate is not None:
        found.save_s = account.tuner.estimate.save_s
    return found


if __name__ == "__main__":
    work()
