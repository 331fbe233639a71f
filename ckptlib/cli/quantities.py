"""Quantities on the command line: 175B parameters, 80GB, 2h."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta

import click
from typing_extensions import override

COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
}
SECONDS = {"": 1, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}


class Quantity(click.ParamType):  # type: ignore[type-arg]  # not generic at run time
    """A parameter type: a number above 0 with one of its units, in any case."""

    def __init__(self, name: str, units: Mapping[str, float], example: str, most: float = 1e30) -> None:
        self.name, self._units, self._example, self._most = name, units, example, most

    @override
    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, (int, float)):
            return value
        found = re.fullmatch(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[0-9]{1,2})?)\s*([a-z]*)\s*", str(value).lower())
        number = float(found[1]) * self._units[found[2]] if found and found[2] in self._units else 0.0
        if not 0 < number < self._most:
            units = ", ".join(unit for unit in self._units if unit)
            self.fail(f"{value!r}: expected a number above 0 and a unit ({units}), such as {self._example}", param, ctx)
        return number


class Share(click.FloatRange):
    """A parameter type: a number above 0 and below 1. click's own takes `nan`, of which no comparison is true, and
    what is so small that an interval for it is infinite."""

    def __init__(self) -> None:
        super().__init__(0, 1, min_open=True, max_open=True)

    @override
    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = super().convert(value, param, ctx)
        if not number >= 1e-9:
            self.fail(f"{value}: expected a share of the time, such as 0.035", param, ctx)
        return number


COUNT = Quantity("count", COUNTS, "7B")
SIZE = Quantity("size", BYTES, "80GB")
SPAN = Quantity("time", {unit: SECONDS[unit] for unit in SECONDS if unit}, "2h")
"""A time in seconds. It needs a unit: a bare number would be steps to some, hours to others."""
HOURS = Quantity("time", {**SECONDS, "": 3600}, "24h", most=timedelta.max.total_seconds())
"""A time in seconds, too; a bare number is hours. A timedelta can hold it."""
