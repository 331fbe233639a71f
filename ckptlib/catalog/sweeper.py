"""The sweeps of a live job: after each commit it drops steps, and now and then it looks at all that the root holds.

What was dropped stays for the grace period, parts and packs of all ranks. A job that saves every minute has a thousand
such steps, and to list them after each commit would take longer than the commit.

Nor need a store have room for a thousand steps of which two are kept. Where it is full, or nearly, what was dropped
goes when that is EARLY_S ago. That it may still be read is the lesser evil: no save would succeed for the rest of the
grace period. No save loses anything: what one uses was dropped after it was begun, if at all, so the age of the oldest
is added. A job of before, which does not know yet that this one has begun, may be about to commit: so nothing goes
early in the first EARLY_S after the record of this one, and a commit that takes longer looks again. No torch.
"""

from __future__ import annotations

import logging
import math
import time

from ckptlib.catalog import clock
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import drop_unkept, sweep
from ckptlib.errors import StoreFull
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.policy.keep import EARLY_S, Keep

log = logging.getLogger(__name__)

LOOKS = 24
"""In a grace period: by a 24th of it, bytes may stay longer."""

ROOMS = 10
"""So often in EARLY_S a full store is given room, at most: a whole sweep takes a while."""


class Sweeper:
    """Used by one thread at a time."""

    def __init__(self, catalog: Catalog, keep: Keep) -> None:
        self._catalog, self._keep = catalog, keep
        self._look_at = 0.0
        """When all is listed again; by the monotonic clock."""
        self._room_at = 0.0
        """When a full store may be given room."""
        self._recorded: tuple[float, float] = math.nan, 0.0
        """The time of the job's record, by the store's clock, and when it was seen first, by the monotonic one."""
        self._told = False
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
        self._look(committed, now)

    def doubt(self) -> None:
        """A step of this job may be listed that lacks objects: all is listed before the next steps are dropped."""
        self._look_at = 0.0

    def make_room(self, decided: SaveId, in_flight_s: float) -> None:
        """The store is full, or nearly, when this job has committed this one, or has given it up. Raises as `sweep`.

        `in_flight_s`: how long ago the oldest save was begun that may still be committed. Not while one is committed.
        """
        now = time.monotonic()
        if now < self._room_at:
            return
        self._room_at = now + EARLY_S / ROOMS
        if self._is_young(decided.generation, now):
            return
        nbytes = self._look(decided, now, EARLY_S + in_flight_s)
        if nbytes and not self._told:
            log.warning(
                "%s is nearly full: what was dropped goes after %.0f s instead of %s, beginning with %d bytes",
                *(self._catalog.store.url, EARLY_S, self._keep.grace, nbytes),
            )
            self._told = True

    def _is_young(self, generation: GenerationId, now: float) -> bool:
        """Whether the job's record may have been put within EARLY_S. A store that takes nothing more has a clock that
        stands still, so what has passed here counts as well."""
        store = self._catalog.store
        record = store.entry(generation.key) or store.entry(keys.copy_key(generation.key))  # each may be lost
        if record is None:
            return True
        if self._recorded[0] != record.modified:
            self._recorded = record.modified, now
        age = clock.now(store) - record.modified
        return max(age, now - self._recorded[1]) < EARLY_S

    def _look(self, decided: SaveId, now: float, early_s: float = math.inf) -> int:
        """A whole sweep. Returns the bytes given back."""
        found = sweep(self._catalog, self._keep, decided.generation, early_s=early_s, decided=decided)
        self._broken = {save for save in found.broken if save <= decided}  # a later one was put meanwhile
        self._look_at = now + self._keep.grace.total_seconds() / LOOKS
        return found.nbytes_deleted
