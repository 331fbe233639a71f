"""Counts saves in a row that came to nothing, and over what time: when is it time to end the training?

Pure: it is told the time. Three failures within seconds are no reason: a store that is away for a while comes back.
"""

from __future__ import annotations

MAX_FAILURES = 3
"""How many saves must fail in a row, however long that takes, before all ranks raise; one alone is a warning."""


class FailureRun:
    """Counts the failures in a row of one rank."""

    def __init__(self, max_outage_s: float) -> None:
        self.max_outage_s = max_outage_s
        self.count = 0
        self.error: Exception | None = None
        """Why the last of these failed."""
        self._first = self._last = 0.0

    def fail(self, now: float, error: Exception, is_local: bool = False) -> None:
        """Notes another failed save. `now`: seconds, by a clock that never goes back. `is_local`: it failed in the
        store only, and is durable on a local disk, so the failures last no longer than from now on."""
        if not self.count or is_local:
            self._first = now
        self.count += 1
        self._last = now
        self.error = error

    def succeed(self) -> None:
        """Notes that a save is durable: the count starts again."""
        self.count, self.error = 0, None

    @property
    def lasted_s(self) -> float:
        """Seconds from the first of these failures to the last one."""
        return self._last - self._first if self.count else 0.0

    @property
    def too_long(self) -> bool:
        """Whether these are more than a few failures, and longer than a short outage."""
        return self.count >= MAX_FAILURES and self.lasted_s >= self.max_outage_s
