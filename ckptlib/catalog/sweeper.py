"""The sweeps of a live job: after each commit it drops steps, and now and then it looks at all that the root holds.

What was dropped stays for the grace period, parts and packs of all ranks. A job that saves every minute has a thousand
such steps, and to list them after each commit would take longer than the commit. No torch.
"""

from __future__ import annotations

import time

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import drop_unkept, sweep
from ckptlib.errors import StoreFull
from ckptlib.format.keys import SaveId
from ckptlib.policy.keep import Keep

LOOKS = 24
"""In a grace period: by a 24th of it, bytes may stay longer."""


class Sweeper:
    """Used by one thread at a time."""

    def __init__(self, catalog: Catalog, keep: Keep) -> None:
        self._catalog, self._keep = catalog, keep
        self._look_at = 0.0
        """When all is listed again; by the monotonic clock."""
        self._broken: set[SaveId] = set()
        """Steps that lacked objects then. This job has committed the later ones, and whoever commits looks."""

    def sweep(self, committed: SaveId) -> None:
        """This job has committed this one. Raises what `retention.sweep` raises."""
        now = time.monotonic()
        if now < self._look_at:
            try:
                drop_unkept(self._catalog, self._keep, committed.generation, self._broken)
            except StoreFull:  # a whole sweep deletes before it puts anything
                self._look_at = 0.0
                raise
            return
        found = sweep(self._catalog, self._keep, committed.generation)
        self._broken = {save for save in found.broken if save <= committed}  # a later one was put meanwhile
        self._look_at = now + self._keep.grace.total_seconds() / LOOKS
