"""One committed step of a store, as a source for a reader."""

from __future__ import annotations

from collections.abc import Collection

from ckptlib.catalog.catalog import Catalog
from ckptlib.format.layout import Layout
from ckptlib.format.manifest import Manifest
from ckptlib.format.part import Part
from ckptlib.stores.io_limits import IoLimits


class Committed:
    """A committed step, as a source for a Reader."""

    def __init__(self, catalog: Catalog, manifest: Manifest) -> None:
        self._catalog = catalog
        self._parts = manifest.parts
        self.save = manifest.save
        self.world_size, self.layouts = manifest.world_size, manifest.layouts
        self.where, self.in_memory = catalog.store.url, False
        self.limits = IoLimits(reads=1 if catalog.store.is_local else 2)

    def layout(self, digest: str) -> Layout:
        return self._catalog.layout(digest)

    def part(self, rank: int) -> Part:
        return self._catalog.part(self._parts[rank])

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        self._catalog.store.get_into(pack, offset, buffer)

    def near(self, ranks: Collection[int]) -> None:
        """A store is as far from one rank as from another."""

    def bring(self, ranks: Collection[int]) -> None:
        """All of it is readable everywhere."""
