"""Elapsed time that includes the time while the machine is suspended, as the sweeps of other machines see it. No torch.

Python's monotonic clock stands still while the machine is suspended, and so does a time-out by it.
"""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""On systems other than Linux, the monotonic clock itself goes on while the machine is suspended."""


class Elapsed:
    """Measures the time since it was made."""

    def __init__(self) -> None:
        self._began, self._began_wall = time.clock_gettime(_CLOCK), time.time()

    def seconds(self) -> float:
        """Returns the seconds since then, suspended or not."""
        return time.clock_gettime(_CLOCK) - self._began

    def at_most(self) -> float:
        """Returns the same, or the seconds by the wall clock if these are more. No clock of a paused virtual machine
        goes on, and its wall clock is set afterwards. The result is too large if the clock was set for another
        reason."""
        return max(self.seconds(), time.time() - self._began_wall)
