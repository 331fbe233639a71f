"""Finds what a killed import left in a root, and decides whether the same import may go on with it.

    killed ...                      leaves                              the same import, given again
    before its first pack           a generation without a save         begins
    between packs                   packs that no part names            goes on: those that are proved are not put again
    between its part and the step   a whole save that is not listed     compares that with the source, then commits it
    afterwards                      the step                            compares it

An import goes on by using the same generation: what is left lies under the name of its save, and so does what it puts
now. That also keeps a sweep away, which spares a save as long as any object of it is young.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import choose_parts
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.format import keys
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.keys import PartName, SaveId

IMPORTED, SOURCE = "imported", "source"
"""Tags of an import's generation: the library that wrote the source, and `identity_of` it."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A save of the newest generation that has no manifest."""

    save: SaveId
    names: Sequence[PartName]
    """Its part, if that is there: then the save is whole. Empty: some of its packs may be there."""


def identity_of(source: Path, *asked: object) -> str:
    """Returns a digest of the names, sizes and times of a source's files, and of the options.

    It only tells whether an earlier import may have been the same. That packs are of this source, their digests prove.
    """
    files = sorted(path for path in source.rglob("*") if path.is_file()) if source.is_dir() else [source]
    told = [[str(path.resolve()), (status := path.stat()).st_size, status.st_mtime_ns] for path in files]
    return digester(XXH3)(json.dumps([told, *asked], default=str).encode())


def find(catalog: Catalog, step: int, identity: str) -> Unfinished | None:
    """Returns what the same import left of this step uncommitted, if no job has saved to the root since; else None."""
    newest = max(catalog.generations.ids(), default=None)
    if newest is None:
        return None
    try:
        if catalog.generations.record(newest).tags.get(SOURCE) != identity:
            return None
    except UNREADABLE:
        return None
    save = SaveId(step, newest)
    if any(keys.parse_trash_key(entry.key) == save for entry in catalog.store.scan(save.trash_key)):
        return None  # a sweep has found it too old, or it differs from the source: its packs will be removed
    names, missing = choose_parts(catalog.parts(save), 1)
    if missing and not catalog.store.scan(save.packs_prefix):
        return None
    return Unfinished(save, () if missing else names)
