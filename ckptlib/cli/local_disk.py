"""The steps of a root with a local tier on this host's disk, for `ckptlib ls --local`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ckptlib.catalog.begun import Begun, noted
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.local_disk import by_save
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.stores.local import LocalStore


@dataclass(frozen=True, slots=True)
class DiskShare:
    """The objects of one save on this disk."""

    ranks: tuple[int, ...]
    """The ranks whose parts are there, ascending."""
    nbytes: int
    """Bytes of the packs that were written for it."""
    since: float
    """When its newest part was put."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The saves and notes on this disk."""

    shares: Mapping[SaveId, DiskShare]
    begun: Sequence[Begun]
    """Notes of generations whose records the store may lack."""


def on_disk(path: str, root: Catalog) -> Disk:
    """Reads what a local tier's directory holds. Raises UsageError if the directory is not of this root."""
    if not Path(path).is_dir():
        raise click.UsageError(f"--local {path}: there is no such directory")
    with LocalStore(path) as store:
        found, wanted = Catalog(store).root().id, root.root().id
        if found != wanted:
            raise click.UsageError(f"--local {path}: belongs to root {found}; {root.store.url} is root {wanted}")
        entries, packs, begun = store.scan(keys.PARTS), store.scan(keys.PACKS), noted(store)
    times = {entry.key: entry.modified for entry in entries}
    sizes: dict[SaveId, int] = {}
    for entry in packs:
        save = keys.pack_save(entry.key)
        if save is not None:
            sizes[save] = sizes.get(save, 0) + entry.nbytes
    parts = by_save(name for entry in entries if (name := keys.parse_part_key(entry.key)) is not None)
    shares = {
        save: DiskShare(
            tuple(sorted(ranks)),
            sizes.get(save, 0),
            max(times[name.key] for some in ranks.values() for name in some),
        )
        for save, ranks in parts.items()
    }
    return Disk(shares, begun)
