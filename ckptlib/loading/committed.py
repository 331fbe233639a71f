"""Resolves, once for all ranks, the committed step of a store that they load."""

from __future__ import annotations

from collections.abc import Callable

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.resolving import resolve_as_put
from ckptlib.format.keys import SaveId, parse_save
from ckptlib.format.manifest import Manifest
from ckptlib.policy.best import Best
from ckptlib.ranks.group import Group
from ckptlib.ranks.together import by_rank_0
from ckptlib.reading.committed import Committed


def resolve(group: Group, catalog: Catalog, step: int | str, best: Best | None = None) -> Committed:
    """Returns one step for all ranks, read once. Collective. `best`: see `Catalog.resolve`."""
    return Committed(catalog, resolve_manifest(group, catalog, step, best))


def resolve_manifest(group: Group, catalog: Catalog, step: int | str, best: Best | None = None) -> Manifest:
    """Returns the manifest of the step that `resolve` returns. Collective."""
    return _read_once(group, catalog, f"resolving step {step}", lambda: resolve_as_put(catalog, step, best))


def read_manifest(group: Group, catalog: Catalog, save: SaveId) -> Manifest:
    """Returns the manifest of a step that was just listed, and is not listed again. Collective. Raises
    CheckpointNotFound."""
    return _read_once(group, catalog, f"reading step {save}", lambda: catalog.manifest_as_put(save))


def _read_once(group: Group, catalog: Catalog, what: str, read: Callable[[], tuple[Manifest, bytes]]) -> Manifest:
    def find() -> bytes:
        manifest, document = read()
        return str(manifest.save).encode() + b"\n" + document

    name, _, document = by_rank_0(group, what, find).partition(b"\n")
    save = parse_save(name.decode())
    return Manifest.decode(save, document, f"{catalog.store.url}/{save.manifest_key}")
