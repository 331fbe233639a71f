"""A committed step that the job restores from the store, and what its writers need not ask of it again.

The restore reads the manifest, this rank's part, and packs. The first save after it takes over what has not changed
since, so its writer wants all three; see `writer.parents`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from itertools import chain

from typing_extensions import override

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.pack_sizes import check_pack
from ckptlib.catalog.reading import each
from ckptlib.catalog.second_read import decoded
from ckptlib.errors import FormatError, StoreError
from ckptlib.format.manifest import Manifest
from ckptlib.format.part import Part
from ckptlib.ranks.group import Group
from ckptlib.reading.committed import Committed
from ckptlib.writer.known_origin import KnownOrigin, OwnPart

log = logging.getLogger(__name__)


class StoredStep(Committed):
    """A source for a Reader, of one rank."""

    def __init__(self, catalog: Catalog, manifest: Manifest, group: Group) -> None:
        super().__init__(catalog, manifest)
        self._manifest, self._group = manifest, group
        self._own: tuple[Part, OwnPart] | None = None
        self._ends: dict[str, int] = {}
        """How far each pack was read, by key."""
        self._lock = threading.Lock()

    @override
    def part(self, rank: int) -> Part:
        name = self._manifest.parts[rank]
        store = self._catalog.store
        part, document = decoded(store, lambda: store.get(name.key), lambda d: (self._catalog.decode_part(name, d), d))
        if rank == self._group.rank:
            self._own = part, OwnPart(name, document)
        return part

    @override
    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        super().read_into(pack, offset, buffer)
        with self._lock:
            self._ends[pack] = max(self._ends.get(pack, 0), offset + len(buffer))

    def known(self) -> KnownOrigin:
        """Returns what this rank's writer need not ask, once all is read: every load reads the part of its own rank."""
        part = None if self._own is None or self.world_size != self._group.size else self._usable(*self._own)
        if self._group.rank != 0:
            return KnownOrigin(self.save, part)
        accounted = self._catalog.generations.was_accounted(self.save.generation)
        return KnownOrigin(self.save, part, self._manifest.encode(), accounted)

    def _usable(self, part: Part, own: OwnPart) -> OwnPart | None:
        """Returns this rank's part, if all that it needs of its packs is there: read up to its end, or else listed."""
        unread = [pack for pack, end in zip(part.packs, needed(part), strict=True) if self._ends.get(pack.key, 0) < end]
        try:
            for _ in each(lambda pack: check_pack(self._catalog.store, pack), unread):
                pass
        except (FormatError, StoreError) as error:
            log.warning(
                "the next save is written whole, since packs of step %d cannot be used: %s", part.save.step, error
            )
            return None
        return own


def needed(part: Part) -> Sequence[int]:
    """Returns how many bytes of each pack a part needs: up to the end of its last chunk, or base of one, there."""
    ends = [0] * len(part.packs)
    table = part.table
    places = zip(table.packs, table.offsets, part.stored, strict=True)
    bases = ((b.pack, b.offset, b.stored) for b in (coding.base for coding in part.codings.values()) if b is not None)
    for pack, offset, stored in chain(places, bases):
        ends[pack] = max(ends[pack], offset + stored)
    return ends
