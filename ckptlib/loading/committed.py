"""One committed step of a store: resolved once for all ranks, and read by each."""

from __future__ import annotations

from collections.abc import Collection

from ckptlib.catalog.catalog import Catalog
from ckptlib.format.keys import parse_save
from ckptlib.format.layout import Layout
from ckptlib.format.manifest import Manifest
from ckptlib.format.part import Part
from ckptlib.policy.best import Best
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together
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


def resolve(group: Group, catalog: Catalog, step: int | str, best: Best | None = None) -> Committed:
    """One step for all ranks, read once. Collective. `best`: see `Catalog.resolve`."""

    def find() -> bytes | None:
        if group.rank != 0:
            return None
        found = catalog.resolve(step, best)
        document = catalog.manifest_document(found)
        Manifest.decode(found, document, f"{catalog.store.url}/{found.manifest_key}")
        return str(found).encode() + b"\n" + document

    data = group.broadcast(together(group, f"resolving step {step}", find))
    name, _, document = data.partition(b"\n")
    found = parse_save(name.decode())
    manifest = Manifest.decode(found, document, f"{catalog.store.url}/{found.manifest_key}")
    return Committed(catalog, manifest)
