"""Measures how many of something there are per byte, on stretches of many sizes. Pure numbers.

Each stretch counts by its bytes: the time of a request, or of a call, says little about the speed of a store or codec.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_BYTES = 256 * 1024 * 1024
"""Measurements before the last this many bytes count for less than half."""


@dataclass(slots=True)
class Rate:
    """Seconds, or stored bytes, per byte."""

    amount: float = 0.0
    nbytes: float = 0.0

    def add(self, amount: float, nbytes: int) -> None:
        """Adds one more stretch."""
        left = WINDOW_BYTES / (WINDOW_BYTES + nbytes)
        self.amount, self.nbytes = self.amount * left + amount, self.nbytes * left + nbytes

    @property
    def per_byte(self) -> float:
        """Mean of what was added, which is at least one byte."""
        return self.amount / self.nbytes
