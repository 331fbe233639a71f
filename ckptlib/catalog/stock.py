"""Lists the objects of a root for a sweep. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptlib.catalog import clock
from ckptlib.catalog.catalog import Catalog
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.stores import Entry


@dataclass(frozen=True, slots=True)
class Stock:
    """The objects of a store that may ever be deleted."""

    objects: dict[SaveId, list[Entry]]
    """Parts, then packs, of every save."""
    layouts: list[Entry]
    records: dict[SaveId, Entry]
    """Trash records."""
    clocks: list[Entry]
    """Objects that earlier sweeps put to read the store's clock, and left."""
    committed: set[SaveId]
    refreshes: list[SaveId]
    """Saves that are marked by `ckptlib refresh`; see `Steps.refreshes`."""
    pins: Mapping[SaveId, Sequence[Entry]]
    """The pinned saves, and the objects that pin them."""
    put: Mapping[SaveId, float]
    """See `Steps.put`."""


def take_stock(catalog: Catalog, oldest: float) -> Stock:
    """Lists the objects of a root that may ever be deleted.

    Manifests are listed after parts and packs, so that a save which is committed meanwhile counts as committed. They
    are listed before trash records: if another sweep drops a step meanwhile, the manifest or the record is seen, and so
    is what it uses. They are listed once more if a record is older than `oldest`: its save may be committed all the
    same; see `late_commit`.
    """
    objects: dict[SaveId, list[Entry]] = {}
    records: dict[SaveId, Entry] = {}
    clocks: list[Entry] = []
    layouts = [entry for entry in catalog.store.scan(keys.LAYOUTS) if keys.is_layout_key(entry.key)]
    for entry in [*catalog.store.scan(keys.PARTS), *catalog.store.scan(keys.PACKS)]:
        save = keys.object_save(entry.key)
        if save is not None:
            objects.setdefault(save, []).append(entry)
    steps = catalog.steps()
    for entry in catalog.store.scan(keys.TRASH):
        save = keys.parse_trash_key(entry.key)
        if save is not None:
            records[save] = entry
        elif entry.key.startswith(clock.CLOCK):
            clocks.append(entry)
    committed = {*steps.saves}
    if any(record.modified < oldest for save, record in records.items() if save not in committed):
        committed |= {*catalog.saves()}
    return Stock(objects, layouts, records, clocks, committed, steps.refreshes, steps.pins, steps.put)
