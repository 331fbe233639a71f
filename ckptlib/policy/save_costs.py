"""Records what the last saves cost the training, and predicts what the next one will.

Pure: the tuner measures each cost, and asks for the mean.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

KEPT = 40
"""Number of saves whose costs are remembered, while they are alike."""
RECENT = 3
"""Number of saves that show a change, if they agree."""
SAME_PACE = 1.25
"""Steps are of one pace if none takes this many times as long as another."""


@dataclass(frozen=True, slots=True)
class SaveCost:
    """The cost of one save, in seconds."""

    all_s: float
    """Because of noise, a single save may cost less than nothing."""
    visible_s: float
    step_s: float
    """Length of the steps around it."""

    def is_of_pace(self, step_s: float) -> bool:
        return step_s < SAME_PACE * self.step_s and self.step_s < SAME_PACE * step_s


class SaveCosts:
    """The costs of one rank's saves, in order."""

    def __init__(self) -> None:
        self._costs: deque[SaveCost] = deque(maxlen=KEPT)
        self.noise_s = 0.0
        """How far off the last cost may be, because of the noise of steps."""

    def __len__(self) -> int:
        return len(self._costs)

    def begin_with(self, cost: SaveCost) -> None:
        """Adds a cost that the start before has measured: RECENT saves of another cost count for more."""
        self._costs.extend([cost] * RECENT)

    def clear(self) -> None:
        self._costs.clear()

    def add(self, cost: SaveCost, noise_s: float) -> None:
        """Adds a cost. Forgets those before if the newest agree that a save at this pace no longer costs as much."""
        self._costs.append(cost)
        self.noise_s = noise_s
        alike = [other for other in self._costs if other.is_of_pace(cost.step_s)]
        costs = [other.all_s for other in alike]
        recent, older = costs[-RECENT:], costs[:-RECENT]
        if len(older) >= RECENT - 1:
            is_usual = min(recent) <= max(older) and max(recent) >= min(older)  # as when one in a few is dearer
            if not is_usual and _differ(typical(recent), typical(older), 2 * noise_s):
                for other in alike[:-RECENT]:
                    self._costs.remove(other)

    def mean(self, step_s: float) -> tuple[float, float]:
        """Returns the visible part, and all, of what a save costs beside steps of this length. Needs one save or more.

        Counts only saves at this pace if their cost differs from that of the rest: what slows steps down makes saves
        dearer as well, and when it goes, saves cost what they did before it came.
        """
        costs = [*self._costs]
        alike = [cost for cost in costs if cost.is_of_pace(step_s)]
        if RECENT <= len(alike) < len(costs):
            now_s = typical([cost.all_s for cost in alike])
            then_s = typical([cost.all_s for cost in costs if not cost.is_of_pace(step_s)])
            if _differ(now_s, then_s, 3 * self.noise_s / math.sqrt(len(alike))):
                costs = alike
        visible_s = max(typical([cost.visible_s for cost in costs]), 0.0)
        return visible_s, max(typical([cost.all_s for cost in costs]), visible_s)


def _differ(now_s: float, then_s: float, noise_s: float) -> bool:
    return abs(now_s - then_s) > noise_s + 0.15 * then_s


def typical(values: Sequence[float]) -> float:
    """Returns the mean, since a budget is for all saves together, dear and cheap ones; of three, the median.

    The highest and the lowest value count as much as the ones next to them: neither a pause nor a lucky save moves the
    mean. Only one at each end, since one save in ten may well be cheaper each time, as those beside evaluations.
    """
    ordered = sorted(values)
    inner = ordered[1:-1] or ordered
    return statistics.fmean(min(max(value, inner[0]), inner[-1]) for value in ordered)
