"""Finds old layouts that no step names any more; `retention` deletes them. No torch."""

from __future__ import annotations

import logging
from collections.abc import Set

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.stock import Stock
from ckptlib.catalog.unreadable import UNREADABLE
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.stores import Entry

log = logging.getLogger(__name__)


def unnamed_layouts(catalog: Catalog, stock: Stock, waiting: Set[SaveId], oldest: float) -> list[Entry]:
    """Returns old layouts, and copies, that are named neither by a committed step nor by a save in `waiting`, which may
    still be read. Returns none if one of these may name any layout, for example a save in flight."""
    old = [entry for entry in stock.layouts if entry.modified < oldest]
    if not old or not waiting <= stock.records.keys():
        return []
    try:
        catalog.warm_stands(stock.committed)
        of_steps = [catalog.stand(save).layouts for save in stock.committed]
        of_trash = [catalog.trash_record(save).layouts for save in waiting]
    except UNREADABLE as error:
        log.warning("layouts are left alone, since a document that may name some cannot be read: %s", error)
        return []
    if None in of_trash:
        return []
    named = {keys.layout_key(digest) for some in (*of_steps, *of_trash) for digest in some or ()}
    unnamed = [entry for entry in old if entry.key not in named]
    if not unnamed:
        return []
    copies = [entry for entry in catalog.store.scan(keys.copy_key(keys.LAYOUTS)) if keys.is_layout_key(entry.key)]
    named = {*map(keys.copy_key, named)}
    return unnamed + [entry for entry in copies if entry.modified < oldest and entry.key not in named]
