"""The measured costs of saves: numbers that a start of the job leaves to the next one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

MAX_SECONDS = 1e7
"""The longest time of a step or a save; a longer one was not measured."""

SECONDS = ("step_s", "each_step_s", "save_s", "visible_s", "persist_s")


@dataclass(frozen=True, slots=True)
class Measured:
    """The inputs of the interval. Seconds, except the last."""

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
    num_saves: int
    """Number of saves that were measured."""

    def to_json(self) -> dict[str, float | int]:
        return {name: float(f"{value:.4g}") if type(value) is float else value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, value: object) -> Measured | None:
        """Decodes what `to_json` returned; returns None for anything else. A store's numbers are not trusted."""
        if not isinstance(value, Mapping):
            return None
        seconds = [_seconds(value.get(name)) for name in SECONDS]
        num_saves = value.get("num_saves")
        if min(seconds) < 0 or seconds[0] == 0 or type(num_saves) is not int or num_saves < 1:
            return None
        step_s, each_step_s, save_s, visible_s, persist_s = seconds
        return cls(step_s, each_step_s, save_s, visible_s, persist_s, num_saves)

    def scaled(self, times: float) -> Measured:
        """Returns the costs of saves that cost `times` as much."""
        save_s, visible_s, persist_s = times * self.save_s, times * self.visible_s, times * self.persist_s
        return replace(self, save_s=save_s, visible_s=visible_s, persist_s=persist_s)


def _seconds(value: object) -> float:
    """Returns a valid time in seconds, or -1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
        return -1.0
    return float(value)
