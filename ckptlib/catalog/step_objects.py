"""Finds the objects that one committed step needs, whichever saves put them, from its documents, which are checked.

Packs are not read; listings show that they are there, with the size that the parts tell. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.reading import each
from ckptlib.errors import CorruptData, ObjectNotFound
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.format.manifest import Manifest
from ckptlib.format.part import Part


@dataclass(frozen=True, slots=True)
class StepObjects:
    """The documents and packs of one step."""

    manifest: Manifest
    document: bytes
    """The manifest, as it was put."""
    packs: Mapping[str, int]
    """The bytes of each pack by key, packs of other saves included."""

    @property
    def nbytes(self) -> int:
        """Bytes of all packs."""
        return sum(self.packs.values())

    @property
    def owners(self) -> list[SaveId]:
        """The saves that put these packs."""
        return _owners(self.packs)


def step_objects(catalog: Catalog, save: SaveId) -> StepObjects:
    """Returns the objects of a committed step.

    Raises CheckpointNotFound, ObjectNotFound, CorruptData, FormatError, or what the store raises.
    """
    manifest, document = catalog.manifest_as_put(save)
    packs: dict[str, int] = {}
    for part in each(catalog.part, manifest.parts):
        _add_packs(packs, part)
    check_there(catalog, packs)
    return StepObjects(manifest, document, packs)


def _add_packs(packs: dict[str, int], part: Part) -> None:
    for pack in part.packs:
        if packs.setdefault(pack.key, pack.nbytes) != pack.nbytes:
            raise CorruptData(
                f"{pack.key}: one part says {packs[pack.key]} bytes, that of rank {part.rank} {pack.nbytes}"
            )


def _owners(packs: Iterable[str]) -> list[SaveId]:
    return sorted({owner for key in packs if (owner := keys.pack_save(key)) is not None})


def check_there(catalog: Catalog, packs: Mapping[str, int]) -> None:
    """Looks for packs by listings. Raises ObjectNotFound if one is gone, CorruptData if one has another size."""
    prefixes = [owner.packs_prefix for owner in _owners(packs)]
    sizes = {entry.key: entry.nbytes for listed in each(catalog.store.scan, prefixes) for entry in listed}
    for key, nbytes in packs.items():
        if key not in sizes:
            raise ObjectNotFound(f"{catalog.store.url}/{key}: no such object; the step needs it")
        if sizes[key] != nbytes:
            raise CorruptData(
                f"{catalog.store.url}/{key} has {sizes[key]} bytes, expected {nbytes}; it was cut or replaced"
            )
