"""Maps values to places on a chart, and chooses round numbers for its axes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from ckptlib.words import duration, size

SPANS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Seconds between marks of a time axis."""

DAY_S = 86400

MAX_DATES = 8
"""The most dates on a time axis."""

MAX_DATE = 32_503_680_000.0
"""The year 3000; later times count as no date."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from values to pixels. Values out of range map to its ends."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        if not self.high > self.low:
            return self.start
        share = (value - self.low) / (self.high - self.low)
        return self.start + min(max(share, 0.0), 1.0) * (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Axis:
    """The values that an axis marks, and their labels."""

    ticks: Sequence[float]
    words: Sequence[str]

    @property
    def high(self) -> float:
        return self.ticks[-1]


def seconds_axis(most: float) -> Axis:
    """Returns an axis from 0 to `most` or a little more."""
    return _axis(most, 1.0, lambda value: "0" if not value else _seconds(value))


def bytes_axis(most: float) -> Axis:
    return _axis(
        most, 1000.0 ** math.floor(math.log(max(most, 1.0), 1000)), lambda value: size(value) if value else "0"
    )


def count_axis(most: float) -> Axis:
    return _axis(max(most, 4.0), 1.0, lambda value: f"{value:,.0f}")


def time_axis(first: float, last: float) -> Axis:
    """Returns an axis of dates, UTC. Its marks lie inside the span, but need not fill it."""
    span = max(last - first, 1.0)
    days = math.ceil(span / DAY_S / MAX_DATES)
    gap = next((gap for gap in SPANS if span / gap <= MAX_DATES), days * DAY_S)
    start = math.ceil(first / gap) * gap
    ticks = [start + n * gap for n in range(int((last - start) // gap) + 1)]
    kind = "%b %d" if gap >= DAY_S else "%b %d %H:%M" if span > DAY_S else "%H:%M" if gap >= 60 else "%H:%M:%S"
    return Axis(ticks, [datetime.fromtimestamp(tick, timezone.utc).strftime(kind) for tick in ticks])


def is_date(seconds: float) -> bool:
    """Whether this can be drawn on a time axis: documents may hold any number."""
    return 0.0 < seconds < MAX_DATE


def _axis(most: float, unit: float, word: Callable[[float], str]) -> Axis:
    gap = _round_up(max(most, 1e-6) / unit / 4) * unit
    num = max(math.ceil(most / gap - 1e-9), 1)
    ticks = [n * gap for n in range(num + 1)]
    return Axis(ticks, [word(tick) for tick in ticks])


def _round_up(value: float) -> float:
    """Rounds up to one of 1, 2, 5, 10, 20, ..."""
    power = 10.0 ** math.floor(math.log10(value))
    return next((n * power for n in (1, 2, 5) if value <= n * power * (1 + 1e-9)), 10 * power)


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:g} ms"
    return f"{value:g} s" if value < 600 else duration(value)
