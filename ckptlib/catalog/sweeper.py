"""The sweeps of a live job: after each commit it drops steps, and now and then it lists all objects of the root.

Dropped steps stay for the grace period, with parts and packs of all ranks. A job that saves every minute has a thousand
of them, and listing them after each commit would take longer than the commit.

Nor need a store have room for a thousand steps of which two are kept. If it is full, or nearly, dropped steps are
deleted after EARLY_S. They may still be read, but that is the lesser evil: else no save would succeed for the rest of
the grace period. No save loses anything: a step that it uses was dropped after the save began, if at all, so the age of
the oldest save in flight is added. An earlier job, which does not know yet that this one has begun, may be about to
commit: so nothing is deleted early in the first EARLY_S after the record of this job's generation, and a commit that
takes longer looks again. No torch.
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
"""How many whole sweeps there are in a grace period; so bytes may stay a 24th of it longer."""

ROOMS = 10
"""How many times in EARLY_S room is made in a full store, at most: a whole sweep takes a while."""


class Sweeper:
    """Sweeps the root of a live job. Used by one thread at a time."""

    def __init__(self, catalog: Catalog, keep: Keep) -> None:
        self._catalog, self._keep = catalog, keep
        self._look_at = 0.0
        """When the next whole sweep is due; by the monotonic clock."""
        self._room_at = 0.0
        """When room may be made again in a full store; by the monotonic clock."""
        self._recorded: tuple[float, float] = math.nan, 0.0
        """The time of the job's record, by the store's clock, and when it was first seen, by the monotonic clock."""
        self._told = False
        self._broken: set[SaveId] = set()
        """Steps that lacked objects at the last whole sweep. This job commits the later ones, and checks them then."""

    def sweep(self, committed: SaveId) -> None:
        """Drops steps after this job has committed one; makes a whole sweep if it is due. Raises as `retention.sweep`
        does."""
        now = time.monotonic()
        if now < self._look_at:
            try:
                drop_unkept(self._catalog, self._keep, committed.generation, self._broken)
            except StoreFull:  # the next sweep is a whole one, which deletes before it puts anything
                self._look_at = 0.0
                raise
            return
        self._look(committed, now)

    def doubt(self) -> None:
        """Makes the next sweep a whole one, since a listed step of this job may lack objects."""
        self._look_at = 0.0

    def make_room(self, decided: SaveId, in_flight_s: float) -> None:
        """Deletes dropped steps early, since the store is full, or nearly. Raises as `sweep` does.

        `decided`: the save that this job has just committed or given up. `in_flight_s`: how long ago the oldest save
        began that may still be committed. Must not be called during a commit.
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
        """Whether the job's record may have been put within EARLY_S. The clock of a store that is full stands still, so
        the time that has passed on this host counts as well."""
        store = self._catalog.store
        record = store.entry(generation.key) or store.entry(keys.copy_key(generation.key))  # each may be lost
        if record is None:
            return True
        if self._recorded[0] != record.modified:
            self._recorded = record.modified, now
        age = clock.now(store) - record.modified
        return max(age, now - self._recorded[1]) < EARLY_S

    def _look(self, decided: SaveId, now: float, early_s: float = math.inf) -> int:
        """Makes a whole sweep. Returns the bytes deleted."""
        found = sweep(self._catalog, self._keep, decided.generation, early_s=early_s, decided=decided)
        broken = {save for save in found.broken if save <= decided}  # later ones were committed meanwhile
        for save in sorted(broken - self._broken - {*found.dropped}):
            log.warning(
                "step %d lacks objects, and can be loaded in part at best: keep= keeps other steps in its place. To "
                "see what is lost: ckptlib verify %s %d",
                *(save.step, self._catalog.store.url, save.step),
            )
        self._broken = broken
        self._look_at = now + self._keep.grace.total_seconds() / LOOKS
        return found.nbytes_deleted
