"""The parent of a save, from which it takes over unchanged chunks: a part of the same rank, of a committed step.

Candidates are the parts that this writer has put, and after a start the newest one of its generation, or the one that
the job resumed from. Only a committed step is a parent: its packs exist, and are kept from then on. No torch.
"""

from __future__ import annotations

import logging
import time
from collections import deque

from ckptlib.catalog.catalog import Catalog, Steps
from ckptlib.catalog.pauses import Pauses
from ckptlib.catalog.uses import UNREADABLE
from ckptlib.errors import FormatError, StoreError
from ckptlib.format.keys import SaveId, pack_save
from ckptlib.format.part import Part
from ckptlib.slots.snapshot import Snapshot
from ckptlib.writer.increment import unchanged

log = logging.getLogger(__name__)

KEPT = 5
"""Parts that are remembered: commits may come several saves late."""


class Parents:
    """Of one rank. Used by one thread."""

    def __init__(self, catalog: Catalog, world_size: int) -> None:
        self._catalog = catalog
        self._world_size = world_size
        self._parts: deque[Part] = deque(maxlen=KEPT)
        """Newest last."""
        self._searched = False
        self.origin: SaveId | None = None
        """The step that the job resumed from; None: the record of its generation tells."""

    def begin_anew(self) -> None:
        """There is nothing to be found that this writer has not put."""
        self._searched = True

    def remember(self, part: Part) -> None:
        """A part that was put; once its step is committed, it may be a parent.

        Of two of one save neither may: who knows which one the manifest names. Nothing keeps what only the other uses.
        """
        twins = [other for other in self._parts if other.save == part.save]
        for other in twins:
            self._parts.remove(other)
        if not twins:
            self._parts.append(part)

    def choose(self, snapshot: Snapshot, patience_s: float) -> tuple[Part | None, Steps]:
        """The parent of a snapshot, and the steps that matter to it; None: nothing can be taken over.

        Lists no steps before those of the packs that the candidates use: each rank asks at each save. Waits up to
        `patience_s` for the commit of the newest part, if that has more in common with the snapshot than the parts that
        are committed. Raises StoreError.
        """
        if not self._searched:
            found = self._find(snapshot, self._catalog.steps())
            self._searched = True
            if found is not None:
                self._parts.appendleft(found)
        candidates = [part for part in reversed(self._parts) if fits(part, snapshot)]
        if not candidates:
            return None, Steps([], [])
        oldest = min(map(_oldest_save, candidates))
        steps = self._catalog.steps(oldest)
        deadline, pauses = time.monotonic() + patience_s, Pauses(self._catalog.store, patience_s)
        while True:
            parent = next((part for part in candidates if part.save in steps.saves), None)
            newest = candidates[0]
            if parent is newest or time.monotonic() >= deadline:
                return parent, steps
            if not _nbytes_gained(snapshot, newest, parent):
                return parent, steps
            time.sleep(min(pauses.next(), max(deadline - time.monotonic(), 0.0)))
            steps = self._catalog.steps(oldest)

    def _find(self, snapshot: Snapshot, steps: Steps) -> Part | None:
        """The part of a committed step that this writer has not put, if it can be a parent."""
        save, rank = self._start(snapshot.header.save, steps), snapshot.header.rank
        if save is None:
            return None
        try:
            manifest = self._catalog.manifest(save)
            if manifest.world_size != self._world_size:
                return None
            part = self._catalog.part(manifest.parts[rank])
            if not fits(part, snapshot):
                return None
            self._check_packs(part)
        except (*UNREADABLE, StoreError) as error:
            log.warning(
                "step %d is written whole, since step %d cannot be read: %s",
                snapshot.header.save.step,
                save.step,
                error,
            )
            return None
        return part

    def _start(self, save: SaveId, steps: Steps) -> SaveId | None:
        """The newest committed save of the generation, else the one that it resumed from."""
        own = [other for other in steps.saves if other.generation == save.generation and other != save]
        if own:
            return own[-1]
        if not steps.saves:
            return None
        try:
            resumed = self.origin or self._catalog.generation(save.generation).resumed_from
        except UNREADABLE as error:
            log.warning("step %d is written whole: what the job resumed from cannot be told: %s", save.step, error)
            return None
        return resumed if resumed in steps.saves else None

    def _check_packs(self, part: Part) -> None:
        """Raises FormatError unless the packs of a part are there, with the sizes that it tells."""
        for pack in part.packs:
            sizes = [entry.nbytes for entry in self._catalog.store.scan(pack.key) if entry.key == pack.key]
            if sizes != [pack.nbytes]:
                raise FormatError(f"{pack.key}: expected an object of {pack.nbytes} bytes, found {sizes or 'none'}")


def fits(part: Part, snapshot: Snapshot) -> bool:
    """Whether chunks of equal numbers are of the same bytes of the same tensors, named by the same digests."""
    return part.algorithm == snapshot.algorithm and part.table.cuts_digest == snapshot.table.cuts_digest


def _oldest_save(part: Part) -> SaveId:
    """Of those that a part needs: its own, and those of its packs."""
    return min([part.save, *(of for of in (pack_save(pack.key) for pack in part.packs) if of is not None)])


def _nbytes_gained(snapshot: Snapshot, newest: Part, parent: Part | None) -> int:
    """The bytes that could be taken over from the newest part, but not from the parent."""
    found = {*unchanged(snapshot.digests, newest)}
    if parent is not None:
        found -= {*unchanged(snapshot.digests, parent)}
    return sum(newest.table.nbytes[chunk] for chunk in found)
