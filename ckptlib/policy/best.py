"""Chooses the best of several steps by one of their metrics. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

MODES = ("min", "max")


class _Save(Protocol):
    """A save; saves sort by step."""

    def __lt__(self, other: Any, /) -> bool: ...


S = TypeVar("S", bound=_Save)


@dataclass(frozen=True, slots=True)
class Best:
    """A metric, and whether small or large values are good."""

    metric: str
    mode: str
    """"min" or "max"."""

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            raise TypeError(f"best by {self.metric!r}: expected the name of a metric, such as 'val_loss'")
        if not self.metric:
            raise ValueError("best by '': expected the name of a metric, such as 'val_loss'")
        if self.mode not in MODES:
            raise ValueError(
                f"whether small or large values of {self.metric!r} are best is not said: expected mode='min' (for a "
                f"loss) or mode='max' (for an accuracy), got {self.mode or None!r}"
            )

    def choose(self, values: Mapping[S, float], num: int = 1) -> list[S]:
        """Returns the best saves, the best of all first; among equals the latest. NaN is never best."""
        sign = 1.0 if self.mode == "min" else -1.0
        latest_first = sorted((save for save in values if not math.isnan(values[save])), reverse=True)
        return sorted(latest_first, key=lambda save: sign * values[save])[:num]
