"""A training in virtual time, with saves that cost what a workload says: for judging intervals without waiting.

Knows nothing of how an interval is found: it asks for one, and adds up what each step took with saves and without.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Workload:
    """Seconds, but for `slower`."""

    step: float
    visible: float
    """Of a save, in `after_step`."""
    fence: float
    """Of a save, in the step after it."""
    slower: float
    """By how much of itself a step is slower while a save is written."""
    persist: float
    dearer: float = 1.0
    """How many times as long one save in four, at random, takes to be written."""
    each_step: float = 0.0
    """Of every call of `after_step`."""
    noise: float = 0.03
    """Standard deviation of a step, as a share of it."""
    wander: float = 0.0
    """Standard deviation of the pace, which a step shares with those around it, as a share of it."""
    wander_steps: float = 30.0
    """After so many steps, the pace has little to do with what it was."""
    pause_every: int = 97
    """Steps from one evaluation to the next."""
    pause: float = 12.0
    """Of an evaluation, in steps."""


@dataclass(frozen=True)
class Step:
    """What one step took, and what was seen beside it."""

    seconds: float
    without: float
    """Seconds of the same step, had nothing ever been saved and evaluated."""
    pause: float
    """Seconds of an evaluation."""
    ours: float
    at_work: bool
    saved: bool
    persisted: float | None
    """Seconds, where a save was written by the end of this step."""


class Interval(Protocol):
    """Whoever says when to save."""

    def due(self, since: int) -> bool:
        """Whether a save is due, so many steps after the last one."""

    def note(self, step: Step) -> None:
        """What the step took."""


class Training:
    """Goes on step by step."""

    def __init__(self, workload: Workload, seed: int = 0, warm_up: int = 8) -> None:
        self.workload = workload
        self._random, self._warm_up = random.Random(seed), warm_up
        self._saves_random = random.Random(seed + 1000)
        self._pace_random, self._pace = random.Random(seed + 2000), 0.0
        self._now = 0.0
        self._writes: deque[tuple[float, float]] = deque()
        """Of each save under way: when its writing began, and when it ends."""
        self._num_saves = 0
        self._owed_at_fence = 0.0
        self._since, self._number = 0, 0
        self.steps: list[Step] = []

    def run(self, num_steps: int, interval: Interval) -> None:
        for _ in range(num_steps):
            self._step(interval)

    def run_saves(self, num_saves: int, interval: Interval) -> None:
        until, limit = self._num_saves + num_saves, self._number + 1_000_000
        while self._num_saves < until and self._number < limit:
            self._step(interval)

    def _step(self, interval: Interval) -> None:
        of = self.workload
        self._number += 1
        kept = math.exp(-1.0 / of.wander_steps)
        self._pace = kept * self._pace + math.sqrt(1 - kept**2) * self._pace_random.gauss(0.0, of.wander)
        without = of.step * self._random.lognormvariate(self._pace, of.noise)
        if self._number <= self._warm_up:
            without *= 10.0 / self._number
        at_work = bool(self._writes)
        fence, self._owed_at_fence = self._owed_at_fence, 0.0
        took = without * (1 + (of.slower if at_work else 0.0)) + fence
        pause = of.pause * of.step if self._number % of.pause_every == 0 else 0.0
        took += pause
        ours = fence + of.each_step
        self._now += took + of.each_step
        persisted = None
        while self._writes and self._writes[0][1] <= self._now:
            began, _ = self._writes.popleft()
            persisted = self._now - began
        self._since += 1
        saved = interval.due(self._since) and len(self._writes) < 2
        if saved:
            costs = of.visible * (20.0 if self._num_saves == 0 else 1.0)
            ours, took = ours + costs, took + costs
            self._now += costs
            began = max(self._now, self._writes[-1][1] if self._writes else 0.0)
            times = of.dearer if self._saves_random.random() < 0.25 else 1.0
            self._writes.append((began, began + times * of.persist))
            self._owed_at_fence, self._since = of.fence, 0
            self._num_saves += 1
        step = Step(took + of.each_step, without, pause, ours, at_work, saved, persisted)
        self.steps.append(step)
        interval.note(step)


def overhead(steps: list[Step]) -> float:
    """Of the time that the same steps take without saves; evaluations are no steps."""
    without = sum(step.without for step in steps)
    return sum(step.seconds - step.pause for step in steps) / without - 1


def num_saves(steps: list[Step]) -> int:
    return sum(step.saved for step in steps)


@dataclass
class Fixed:
    """Every so many steps."""

    interval: int

    def due(self, since: int) -> bool:
        return since >= self.interval

    def note(self, step: Step) -> None:
        pass
