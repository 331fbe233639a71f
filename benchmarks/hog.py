"""A hog takes a core or the disk, and leaves: how soon is a budget kept again, and what do other rules make of it?

Two ranks, one thread each, train before, beside and after a process that spins on a core, or one that writes to the
disk of the checkpoints and syncs it. Three rules take turns, each for the same number of steps in each phase: ours;
CheckFreq's, which only raises the interval, from the one that we have found when the first phase begins; and the fixed
interval at which the saves would have cost as much in all as ours did, which nobody knows before. Whole intervals take
turns with as many steps without `after_step`, in the same processes and beside the same hog.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
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
SAVES = {"before": 8, "beside": 10, "after": 12}
"""Of ours, by phase, at least; the other rules get as many steps as these took."""
PHASE_S, SEGMENT_S = 30.0, 2.0
"""Of training in a phase, and in a segment, at least."""
MOST_S = 400.0
"""Of training in a phase: an interval that never comes down is told all the same."""
ABOVE = 0.005
"""The budget by which an interval still counts as within it."""

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
    run(arguments, "hog", measure, gb=0.02, rounds=1)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for number in range(1 if options.toy else options.rounds):
        for hog in HOGS:
            _compare(options, directory / f"{hog}-{number}", hog, figures)


def _compare(options: Options, directory: Path, hog: str, figures: Figures) -> None:
    """One turn of each rule."""
    order: Line = {
        "hog": hog,
        "nbytes": 1_000_000 if options.toy else int(options.gb * 1e9),
        "step_s": 0.005 if options.toy else STEP_S,
        "budget": 0.9 if options.toy else BUDGET,
        "settle": 1 if options.toy else SETTLE,
        "saves": dict.fromkeys(SAVES, 1) if options.toy else SAVES,
        "phase_s": 0.05 if options.toy else PHASE_S,
        "segment_s": 0.02 if options.toy else SEGMENT_S,
        "most_s": 0.1 if options.toy else MOST_S,
    }
    case, num_ranks = f"hog of the {hog}", 1 if options.toy else 2
    for rule in (OURS, ONLY_UP, FIXED):
        order |= {"rule": rule, "directory": str(directory / rule.replace(" ", "-"))}
        lines = figures.attempt(case, rule, __name__, num_ranks, order, options.timeout_s)
        phases = {line["phase"]: Phase(**line["found"]) for line in lines if line["rank"] == 0}
        if not phases:
            return
        _add(figures, case, rule, phases)
        if rule == OURS:
            _add_response(figures, case, phases, order["budget"], must_follow=not options.toy)
            order |= {"steps": {name: phase.steps for name, phase in phases.items()}, "interval": as_dear(phases)}


@dataclass
class Phase:
    """One rule's, before, beside or after the hog."""

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
    def overheads(self) -> list[float]:
        return [with_s / bare_s - 1 for with_s, bare_s in zip(self.with_s, self.bare_s, strict=True)]


def as_dear(phases: Mapping[str, Phase]) -> int:
    """The fixed interval at which all saves together would have cost what they did."""
    if_each_step = sum(phase.steps * phase.save_s for phase in phases.values())
    return max(round(if_each_step / sum(phase.saves * phase.save_s for phase in phases.values())), 1)


def _add(figures: Figures, case: str, rule: str, phases: Mapping[str, Phase]) -> None:
    for name, phase in phases.items():
        figures.add(case, rule, f"overhead {name}", "1", phase.overheads)
        figures.add(case, rule, f"interval {name}", "steps", phase.intervals)
    with_s = sum(sum(phase.with_s) for phase in phases.values())
    bare_s = sum(sum(phase.bare_s) for phase in phases.values())
    saves, steps = sum(phase.saves for phase in phases.values()), sum(phase.steps for phase in phases.values())
    figures.add(case, rule, "overhead in all", "1", [with_s / bare_s - 1])
    figures.add(case, rule, "checkpoints in all", "1", [saves], steps=steps)
    figures.add(case, rule, "checkpoints per 1,000 steps", "1", [1000 * saves / steps])


def _add_response(figures: Figures, case: str, phases: Mapping[str, Phase], budget: float, must_follow: bool) -> None:
    """How many intervals it took until k rose, until the budget was kept, and until k was as before."""
    before, beside, after = (phases[name] for name in ("before", "beside", "after"))
    usual = max(before.intervals[len(before.intervals) // 2 :])  # it may still come down in the first half
    for what, phase, answers in (
        ("until the interval rose", beside, [interval > usual for interval in beside.intervals]),
        ("until the budget was kept beside the hog", beside, [found <= budget + ABOVE for found in beside.overheads]),
        ("until the interval was as before", after, [interval <= usual for interval in after.intervals]),
    ):
        if True in answers:
            figures.add(case, OURS, what, "saves", [phase.counts[answers.index(True)]])
        elif must_follow:
            figures.failed(f"{case}, {what}", OURS, f"not within {phase.saves} saves")


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
        for name in given["saves"]:
            with hog(given["hog"] if name == "beside" else None, Path(given["directory"])):
                tell(phase=name, found=vars(_phase(name, given, loop, training, saver, only_up.longest)))
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
    name: str, given: Line, loop: Loop, training: Training, saver: ckptlib.Checkpointer, longest: Longest
) -> Phase:
    """Segments, each of whole intervals but for the last one of other rules than ours, which have steps to spend."""
    found = Phase()
    least, most = (math.ceil(given[key] / given["step_s"]) for key in ("segment_s", "most_s"))
    enough = math.ceil(given["phase_s"] / given["step_s"])
    spend = given["steps"][name] if given["rule"] != OURS else most
    while found.steps < spend and (given["rule"] != OURS or found.saves < given["saves"][name] or found.steps < enough):
        began, first = time.perf_counter(), loop.saves
        steps = loop.until_save(least, most=spend - found.steps)
        steps += loop.rest(most=spend - found.steps - steps)  # a fixed interval may be too short for the disk's hog
        found.with_s.append(time.perf_counter() - began)
        found.steps, found.saves = found.steps + steps, found.saves + loop.saves - first
        found.intervals.append(given["interval"] if given["rule"] == FIXED else max(saver.interval, longest.steps or 0))
        found.counts.append(found.saves)
        began = time.perf_counter()
        for _ in range(steps):
            training.step()
        found.bare_s.append(time.perf_counter() - began)
    account = saver._turns._tuning._kinds.store.account
    if account is not None and account.tuner.estimate is not None:
        found.save_s = account.tuner.estimate.save_s
    return found


if __name__ == "__main__":
    work()
