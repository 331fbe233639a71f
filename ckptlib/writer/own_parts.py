"""The parts that a rank puts into one store, and which of them may be there though the put failed. No torch."""

from __future__ import annotations

from ckptlib.catalog.elapsed import Elapsed
from ckptlib.errors import SaveFailed, StoreDenied, StoreFull
from ckptlib.format.keys import SaveId, pack_save
from ckptlib.format.part import Part
from ckptlib.stores import Store
from ckptlib.writer.seen_packs import SeenPacks


class OwnParts:
    """Puts the parts of one rank. One thread puts; others may ask."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._doubted: SaveId | None = None

    def put(
        self, part: Part, key: str, document: bytes, elapsed: Elapsed, may_take_s: float, deadline: float | None
    ) -> None:
        """Puts a part, after the packs of its save. The packs may be gone by now, as sweeps know nothing of a part to
        come. So this checks that they took no longer than a save may; and checks again when the part is there, since it
        may have been put late: a live job's commit asks for no packs.

        Raises SaveFailed if the save has taken longer than it may, asleep or awake, and what `store.put` raises.
        `elapsed`: since before the first of the packs was put.
        """
        self._check_not_swept(part, elapsed, may_take_s, "no part is put")
        before, self._doubted = self._doubted, part.save
        try:
            self._store.put(key, document, deadline=deadline)
        except (StoreDenied, StoreFull):
            # On other stores an earlier request, whose answer was lost, may have put it.
            if self._store.is_local and self._store.entry(key) is None:
                self._doubted = before
            raise
        self._check_not_swept(part, elapsed, may_take_s, "its part counts for nothing")

    def doubt(self, save: SaveId) -> None:
        """Notes that a writer that is gone may have put the part of this save."""
        self._doubted = save

    def may_have_put(self, save: SaveId) -> bool:
        """Returns whether a part may be there by which rank 0 commits this save. Knows only of the last save begun."""
        return self._doubted == save

    def _check_not_swept(self, part: Part, elapsed: Elapsed, may_take_s: float, so: str) -> None:
        """Raises SaveFailed if the packs took too long. If only the wall clock says so, it may have been set; so this
        looks for the packs then."""
        own = (pack for pack in part.packs if pack_save(pack.key) == part.save)
        is_late = elapsed.seconds() > may_take_s
        if is_late or (elapsed.at_most() > may_take_s and SeenPacks(self._store, 0.0).lost(own)):
            raise SaveFailed(f"step {part.save.step}: its packs took longer than a save may (save_deadline); {so}")
