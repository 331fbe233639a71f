"""What saves were measured to cost: numbers that a start of the job leaves to the next one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

MAX_SECONDS = 1e7
"""Of one step or one save: what is longer was not measured."""

SECONDS = ("step_s", "each_step_s", "save_s", "visible_s", "persist_s")


@dataclass(frozen=True, slots=True)
class Measured:
    """The inputs of the interval. Seconds, but for the last."""

    step_s: float
    """Of a step beside which nothing is saved."""
    each_step_s: float
    """What such a step costs beyond the training."""
    save_s: float
    """What one save costs, everything counted."""
    visible_s: float
    """Of this, in `after_step` and at the fence."""
    persist_s: float
    """How long a save takes to be written."""
    num_saves: int
    """Saves that tell of it."""

    def to_json(self) -> dict[str, float | int]:
        return {name: float(f"{value:.4g}") if type(value) is float else value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, value: object) -> Measured | None:
        """The inverse of `to_json`; None for anything else. A store is not trusted to hold numbers that make sense."""
        if not isinstance(value, Mapping):
            return None
        seconds = [_seconds(value.get(name)) for name in SECONDS]
        num_saves = value.get("num_saves")
        if min(seconds) < 0 or seconds[0] == 0 or type(num_saves) is not int or num_saves < 1:
            return None
        step_s, each_step_s, save_s, visible_s, persist_s = seconds
        return cls(step_s, each_step_s, save_s, visible_s, persist_s, num_saves)

    def scaled(self, times: float) -> Measured:
        """Of saves that cost so many times as much."""
        save_s, visible_s, persist_s = times * self.save_s, times * self.visible_s, times * self.persist_s
        return replace(self, save_s=save_s, visible_s=visible_s, persist_s=persist_s)


def _seconds(value: object) -> float:
    """-1: none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
        return -1.0
    return float(value)
