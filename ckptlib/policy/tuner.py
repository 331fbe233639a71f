"""Computes the interval between saves from measured steps: CheckFreq's formula (FAST'21), in both directions.

Pure: it is given times, and reads no clock. As saves are written one after the other, the interval is
k = max(ceil((T_f - o) / T_i), ceil(o / (p T_i)), 1) steps. T_i is a step without any save, T_f how long writing a save
takes, p the budget; o is everything that a save costs the training, found by comparing the steps beside which it is
copied and written with those beside which nothing is.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ckptlib.policy.measured import Measured
from ckptlib.policy.overhead import Overhead
from ckptlib.policy.save_costs import KEPT, RECENT, SAME_PACE, SaveCost, SaveCosts

FIRST = 20
"""Steps before the first save: a baseline, of which half may be warm-up."""
PROBE = 200
"""The most steps to the second save: the first one makes slots and plans, and costs more than any other."""
CLEAN = 3
"""Steps with nothing at work, after a save, before its cost is summed up."""
NEAR = 2 * CLEAN
"""The fewest clean steps that the steps beside a save are compared with: those around it, since the pace of a training
wanders by more than a save costs."""
WIDEN_EVERY = 20
"""After this many intervals without a clean step, one is widened until there are some: they are the baseline."""
WINDOW, NEWEST = 50, 7
"""The fewest steps that make a baseline; and the number of steps that show another pace, if they agree."""
AGE, LEAST = 100, 20
"""A clean step that is more than AGE steps old is no part of a baseline, unless there are fewer than LEAST others:
steps become faster by and by, caches and clocks, and if saves follow closely few of them are clean."""
STALE = 0.05
"""Steps beside a save that are faster than the baseline by more than this share of it disprove it."""
ENOUGH = 20
"""From this many saves on, the mean of their costs is taken as it is."""
PAUSE_STEPS, PAUSE_S = 5.0, 0.25
"""A step that takes PAUSE_STEPS steps and PAUSE_S longer evaluated or waited for something: no save does that to it."""
RAISE, LOWER = 1.05, 1.06
"""How far off the interval must be before it changes; much less than half a point, for budgets of a few percent."""
PAUSES, FEW = 1000, 200
"""Clean steps whose pauses are averaged, and the number as which fewer of them count: one hiccup is no habit."""
LEAST_ROOM = 0.25
"""The part of the budget that is left to saves, even if what every step costs takes more."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One step of the training, from the end of one `after_step` to the end of the next."""

    seconds: float
    ours_s: float
    """The part in `after_step`, except waiting for other ranks, and at the fence."""
    at_work: bool
    """Whether, as it began, a save was being copied or written on some rank."""
    saved: bool
    """Whether another save was begun at its end."""

    @property
    def rest_s(self) -> float:
        return self.seconds - self.ours_s


@dataclass(frozen=True, slots=True)
class Estimate:
    """The measured costs, and the intervals that follow from them. Seconds."""

    step_s: float
    """Length of a step beside which nothing is saved."""
    each_step_s: float
    """Cost of such a step beyond the training."""
    save_s: float
    """Cost of one save, everything counted."""
    visible_s: float
    """The part of `save_s` in `after_step` and at the fence."""
    persist_s: float
    """How long writing a save takes."""
    by_budget: float
    by_persist: float
    by_loss: float
    """Steps; inf if no bound was given."""
    by_failures: float

    @property
    def needed(self) -> float:
        """Steps between saves; below 1 if more than one save at each step would keep to all bounds."""
        return max(self.by_persist, min(self.by_budget, self.by_loss, self.by_failures), 0.0)

    def overhead(self, interval: int) -> float:
        """Returns the cost as a share of the training's time, with a save every `interval` steps."""
        return (self.save_s / interval + self.each_step_s) / self.step_s


class Tuner:
    """Tunes the interval of one rank. The ranks tell each other what they need, and the longest interval counts."""

    def __init__(self, asked: Overhead, snapshots: bool = False) -> None:
        """`snapshots`: whether memory has an interval of its own.

        The cost of such snapshots counts as training: only the saves to the store are tuned.
        """
        self._asked, self._snapshots = asked, snapshots
        self.interval = FIRST
        """Steps between saves that this rank needs."""
        self.estimate: Estimate | None = None
        """The estimate that the interval follows from; None before the first save."""
        self._clean: deque[Iteration] = deque(maxlen=1000)
        self._clean_at: deque[int] = deque(maxlen=1000)
        """Number of each clean step."""
        self._rest_s: float | None = None
        """The baseline of the last save; None until the second one."""
        self._longer: deque[float] = deque(maxlen=PAUSES)
        """By how much clean steps were longer: short pauses and noise, which also occur beside saves."""
        self._number = 0
        self._costs = SaveCosts()
        self._persists: deque[float] = deque(maxlen=RECENT)
        self._num_saves = 0
        self._first = FIRST
        """Steps before the first save, fewer if more work than is allowed may be lost by then."""
        self._before = 0
        """Saves of the start before, whose cost is known; 0 if none is."""
        self._since = 0
        """Steps since the last save."""
        self._since_s = 0.0
        self._beside: list[Iteration] = []
        """Steps beside which the save was at work, and the one at whose end it was begun; until its cost is known."""
        self._num_clean = 0
        """Steps since the save with nothing at work."""
        self._dry = 0
        """Intervals in a row without such steps."""

    def remember(self, measured: Measured) -> None:
        """Goes on from what the start before has measured, until this one has measured three saves of another cost.

        Call it before the first step. The first save of this start is unlike others, and its cost does not count.
        """
        self._before = measured.num_saves
        self._costs.begin_with(SaveCost(measured.save_s, measured.visible_s, measured.step_s))
        self._persists.extend([measured.persist_s + measured.step_s / 2] * RECENT)
        self._decide(measured.step_s, measured.each_step_s)
        self._first = self.interval

    @property
    def measured(self) -> Measured | None:
        """The costs for the next start; None before two saves, of which the first does not count."""
        found = self.estimate
        if found is None or not self._costs:
            return None
        visible_s, save_s = self._costs.mean(found.step_s)
        num_saves = self._before + self._num_saves
        return Measured(found.step_s, found.each_step_s, save_s, visible_s, found.persist_s, min(num_saves, KEPT))

    @property
    def widens(self) -> bool:
        """Whether the next save should wait until there is a baseline; not longer than work may be lost."""
        if self._num_saves == 0 or not self._beside or self._would_lose_too_much():
            return False
        if self._num_saves == 1:
            return True
        return self._dry >= WIDEN_EVERY - 1 and self._since < 2 * self.interval + 2 * len(self._beside) + FIRST

    def _would_lose_too_much(self) -> bool:
        lost = self._asked.at_most_lost
        step_s = self._since_s / max(self._since, 1)
        return lost is not None and self._since_s + step_s + max(self._persists, default=0.0) > lost.total_seconds()

    def persisted(self, seconds: float) -> None:
        """Notes that a save of this rank was written in `seconds`, not counting waiting for another save."""
        self._persists.append(seconds)

    def note(self, iteration: Iteration) -> None:
        """Notes one step."""
        self._number += 1
        if iteration.saved:
            if self._beside:  # the save before was at work until now
                self._dry += 1
                self._settle()
            self._num_saves += 1
            self._since, self._since_s, self._num_clean = 0, 0.0, 0
            self._beside = [iteration]
        else:
            self._since += 1
            self._since_s += iteration.seconds
            self._note_unsaved(iteration)

    def _note_unsaved(self, iteration: Iteration) -> None:
        if iteration.at_work:
            if self._beside and len(self._beside) < 100_000:
                self._beside.append(iteration)
            return
        self._clean.append(iteration)
        self._clean_at.append(self._number)
        self._num_clean += 1
        if self._rest_s is not None:
            self._longer.append(_slower(iteration.rest_s, self._rest_s))
        if self._num_saves == 0:
            self._bound_first()
        elif self._beside and self._num_clean >= CLEAN:
            self._dry = 0
            self._settle()
        else:
            self._bound_again()

    def _bound_first(self) -> None:
        """Bounds the interval to the first save, of which nothing is known: it must not come too late either."""
        if self._asked.at_most_lost is not None and self._num_clean >= CLEAN:
            step_s = statistics.median(step.seconds for step in self._clean)
            lost_s = self._asked.at_most_lost.total_seconds() - max(self._persists, default=0.0)
            self.interval = max(min(self._first, int(lost_s / step_s)), 1)

    def _bound_again(self) -> None:
        """Decides again if steps became slower behind the save that the interval follows from. Pauses do not count."""
        found = self.estimate
        if found is not None and self._asked.at_most_lost is not None and self._num_clean >= NEWEST:
            newest = [self._clean[i] for i in range(-NEWEST, 0)]
            step_s = statistics.median(step.seconds for step in newest)
            if step_s > SAME_PACE * (found.step_s + found.each_step_s):
                self._decide(_usual(newest), statistics.median(step.ours_s for step in newest))

    # What a save cost

    def _settle(self) -> None:
        """Sums up a save's cost when its work has ended, or goes on in the next interval as it did in this one."""
        beside, self._beside = self._beside, []
        if not self._clean:
            return
        self._forget_other_pace()
        window = self._window(max(WINDOW, 2 * len(beside)))
        rest_s, near_s = _usual(window), _usual(window[-max(NEAR, 2 * len(beside)) :])
        each_step_s = statistics.median(step.ours_s for step in window)
        deviation_s = _deviation([step.rest_s for step in window])
        noise_s = deviation_s * math.sqrt(len(beside))
        faster_s = rest_s - statistics.median(step.rest_s for step in beside)
        if self._dry and faster_s > max(STALE * rest_s, 3 * noise_s / len(beside)):
            self._dry = WIDEN_EVERY  # no save makes steps faster: the baseline is of another time
            return
        ours_s = sum(step.ours_s - each_step_s for step in beside)
        if self._rest_s is not None and _is_other_pace(rest_s, self._rest_s, deviation_s):
            self._longer.clear()
        if self._num_saves > 1:  # of the steps before the first one, half may be warm-up
            self._rest_s = rest_s
        longer_s = sum(self._longer) / max(len(self._longer), FEW)
        cost_s = ours_s + sum(_slower(step.rest_s, near_s) - longer_s for step in beside)
        if self._num_saves > 1 or not self._before:
            self._costs.add(SaveCost(cost_s, ours_s, rest_s), noise_s)
        self._decide(rest_s, each_step_s)
        if self._num_saves == 1 and not self._before:  # the first save was not like others
            self._costs.clear()

    def _window(self, num: int) -> list[Iteration]:
        """Returns the newest clean steps, at most `num`."""
        oldest = self._number - 2 * max(num, AGE // 2)
        young = sum(at > oldest for at in self._clean_at)
        return list(self._clean)[-min(max(young, LEAST), num) :]

    def _forget_other_pace(self) -> None:
        """Forgets steps measured before the training became slower or faster: they are no baseline any more."""
        rests = [step.rest_s for step in self._clean][-WINDOW:]
        recent, older = rests[-NEWEST:], rests[:-NEWEST]
        if len(older) >= NEWEST:
            now_s, then_s = statistics.median(recent), statistics.median(older)
            if _is_other_pace(now_s, then_s, _deviation(older)):
                while len(self._clean) > NEWEST:
                    self._clean.popleft()
                    self._clean_at.popleft()

    def _decide(self, rest_s: float, each_step_s: float) -> None:
        asked, before = self._asked, self.estimate
        if self._costs or before is None:
            visible_s, save_s = self._costs.mean(rest_s)
        else:  # the first save was not like others, but no other is known
            visible_s, save_s = before.visible_s, before.save_s
        told = self._before + self._num_saves
        if told < ENOUGH:  # few measure it yet: as much as it may well be
            save_s += self._costs.noise_s * (max(told - 1, 1) ** -0.5 - ENOUGH**-0.5)
        if self._snapshots:
            rest_s, each_step_s = rest_s + each_step_s, 0.0
        rest_s = max(rest_s, 1e-9)
        persist_s = statistics.median(self._persists) - rest_s / 2 if self._persists else 0.0
        persist_s = max(persist_s, 0.0)  # its end is seen at the end of a step, on average half of one late
        room_s = max(asked.at_most * rest_s - each_step_s, LEAST_ROOM * asked.at_most * rest_s)
        by_loss = by_failures = math.inf
        if asked.at_most_lost is not None:
            with_saves_s = rest_s * (1 + asked.at_most) + each_step_s
            by_loss = max((asked.at_most_lost.total_seconds() - persist_s) / with_saves_s, 0.0)
        if asked.mtbf is not None:
            by_failures = math.sqrt(2 * save_s * asked.mtbf.total_seconds()) / rest_s
        self.estimate = Estimate(
            step_s=rest_s,
            each_step_s=each_step_s,
            save_s=save_s,
            visible_s=visible_s,
            persist_s=persist_s,
            by_budget=save_s / room_s,
            by_persist=(persist_s - save_s) / rest_s,
            by_loss=by_loss,
            by_failures=by_failures,
        )
        self._move(self.estimate)

    def _move(self, estimate: Estimate) -> None:
        """Changes the interval only if that is worth it, but never leaves it beyond a bound."""
        needed = estimate.needed
        least = max(math.ceil(estimate.by_persist), 1)
        if self._num_saves == 0:
            self.interval = max(math.ceil(needed), 1)
        elif self._num_saves == 1 and not self._before:
            self.interval = max(min(math.ceil(needed), PROBE), least)
        elif needed > RAISE * self.interval or max(math.ceil(LOWER * needed), 1) < self.interval:
            self.interval = max(math.ceil(needed), self.interval // 2, 1)
        bound = min(estimate.by_loss, estimate.by_failures)
        if bound < self.interval:
            self.interval = max(math.floor(bound), least)

    # In words

    @property
    def why(self) -> str:
        """The numbers that the interval follows from, as a text."""
        found, asked = self.estimate, self._asked
        if found is None:
            return "no save has been measured yet"
        text = "" if self._num_saves else "as the start before has measured it, "
        text += (
            f"a save costs {found.save_s:.3g} s ({found.visible_s:.3g} s of it in after_step and at the fence, the "
            f"rest in slower steps) and is written in {found.persist_s:.3g} s; a step without takes {found.step_s:.3g} "
            "s. "
        )
        if found.each_step_s > (1 - LEAST_ROOM) * asked.at_most * found.step_s:
            text += f"after_step alone takes {found.each_step_s:.3g} s of each step, which leaves the budget no room. "
        text += f"The budget of {asked.at_most:.1%} asks for {max(math.ceil(found.by_budget), 1)} steps"
        bounds = {"at_most_lost": found.by_loss, "mtbf": found.by_failures}
        name = min(bounds, key=lambda name: bounds[name])
        beaten, limit = bounds[name] < found.by_budget, f"{name}={getattr(asked, name)}"
        if found.by_persist > max(min(found.by_budget, bounds[name]), 1.0):
            text += f"; saves are written one after the other, one in {math.ceil(found.by_persist)} steps"
            text += f", so {limit} cannot be kept" if beaten else ""
        elif beaten:
            overhead = found.overhead(self.interval)
            text += f"; {limit} beats it: {self.interval} steps, at an overhead of {overhead:.1%}"
        return text


def _slower(seconds: float, baseline_s: float) -> float:
    """Returns how much longer a step took; 0 if it paused for something else."""
    slower_s = seconds - baseline_s
    return 0.0 if slower_s > max(PAUSE_STEPS * baseline_s, PAUSE_S) else slower_s


def _usual(steps: Sequence[Iteration]) -> float:
    """Returns the median length of the steps without the part of ckptlib."""
    return statistics.median(step.rest_s for step in steps)


def _is_other_pace(now_s: float, then_s: float, deviation_s: float) -> bool:
    return abs(now_s - then_s) > 2 * deviation_s + 0.02 * then_s


def _deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation as estimated from the median: outliers do not count."""
    median = statistics.median(values)
    return 1.4826 * statistics.median(abs(value - median) for value in values)
