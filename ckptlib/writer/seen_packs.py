"""Checks whether packs of earlier saves, which a save is to refer to, are still in the store. No torch.

No sweep deletes a pack that a committed step needs. A person may, or a rule of the bucket that expires objects, or
moves them to an archive that gives none of them at once. Without this check each step that refers to such a pack would
be committed, and never load. So this asks for what a load will ask: the last byte.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from ckptlib.catalog.reading import each
from ckptlib.errors import FormatError, ObjectNotFound, ObjectUnreadable
from ckptlib.format.part import Pack
from ckptlib.stores import Store

LOOK_AGAIN_S = 600.0
"""Seconds for which a pack that was seen is taken to be there, in stores where requests are paid for."""


class SeenPacks:
    """The packs that one rank's writer has seen. One thread uses it at a time, but for `note`."""

    def __init__(self, store: Store, look_again_s: float | None = None) -> None:
        """`look_again_s`: see LOOK_AGAIN_S; None: as suits the store. With 0 it looks each time."""
        self._store = store
        self._look_again_s = look_again_s if look_again_s is not None else 0.0 if store.is_local else LOOK_AGAIN_S
        self._seen: dict[str, float] = {}
        """When each pack was seen, by the monotonic clock, and in this order."""
        self._lock = threading.Lock()

    def note(self, key: str, when: float | None = None) -> None:
        """Notes that this pack is there, or was at that time, by the monotonic clock. Any thread may call it."""
        now = time.monotonic()
        if when is None or when > now - self._look_again_s:
            self._note(key, now if when is None else when)

    def lost(self, packs: Iterable[Pack]) -> list[Pack]:
        """Returns those of these packs that cannot be read any more. Raises StoreError if the store cannot tell."""
        now = time.monotonic()
        with self._lock:
            self._forget_old(now)
            unsure = [pack for pack in packs if pack.key not in self._seen]
        lost = []
        for pack, is_there in zip(unsure, each(self._is_there, unsure), strict=True):
            if is_there:
                self._note(pack.key, now)
            else:
                lost.append(pack)
        return lost

    def _note(self, key: str, when: float) -> None:
        with self._lock:
            self._forget_old(when)
            self._seen.pop(key, None)
            self._seen[key] = when

    def _forget_old(self, now: float) -> None:
        while self._seen and self._seen[oldest := next(iter(self._seen))] <= now - self._look_again_s:
            del self._seen[oldest]

    def _is_there(self, pack: Pack) -> bool:
        try:
            self._store.get(pack.key, max(pack.nbytes - 1, 0), 1)
        except (FormatError, ObjectNotFound, ObjectUnreadable):
            return False
        return True
