"""Time that also passes while the machine sleeps, as it does for the sweeps of other machines. No torch.

The monotonic clock of Python stands still while the machine is suspended, and so does a time-out by it.
"""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Elsewhere than on Linux, the monotonic clock of the system goes on while it sleeps."""


class Elapsed:
    """How long ago something began."""

    def __init__(self) -> None:
        self._began, self._began_wall = time.clock_gettime(_CLOCK), time.time()

    def seconds(self) -> float:
        """Asleep or awake."""
        return time.clock_gettime(_CLOCK) - self._began

    def at_most(self) -> float:
        """The same, or seconds by the wall clock where these are more: no clock of a paused virtual machine goes on,
        and its wall clock is set later. Too much where somebody else has set that."""
        return max(self.seconds(), time.time() - self._began_wall)
