"""One committed step, resolved once for all ranks."""

from __future__ import annotations

from ckptlib.catalog.catalog import Catalog, Committed
from ckptlib.format.keys import parse_save
from ckptlib.format.manifest import Manifest
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import together


def resolve(group: Group, catalog: Catalog, step: int | str) -> Committed:
    """One step for all ranks, read once. Collective."""

    def find() -> bytes | None:
        if group.rank != 0:
            return None
        found = catalog.resolve(step)
        catalog.manifest(found)
        return str(found).encode() + b"\n" + catalog.store.get(found.manifest_key)

    data = group.broadcast(together(group, f"resolving step {step}", find))
    name, _, document = data.partition(b"\n")
    found = parse_save(name.decode())
    manifest = Manifest.decode(found, document, f"{catalog.store.url}/{found.manifest_key}")
    return Committed(catalog, manifest)
