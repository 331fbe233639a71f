"""Finds committed steps that lack objects, as far as a listing and their manifests tell.

If a root was copied while a job saved to it, or somebody has deleted objects from it, it lists steps that cannot be
loaded. Names and sizes show most of them, without a request. Pure: no torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

from ckptlib.catalog.stand import Stand
from ckptlib.format import keys
from ckptlib.format.keys import PackSet, SaveId
from ckptlib.stores import Entry


def lacking(
    objects: Mapping[SaveId, Sequence[Entry]], layouts: Collection[str], stands: Mapping[SaveId, Stand]
) -> set[SaveId]:
    """Returns the saves of `stands` that have too few parts or bytes, or use packs or a layout that is not listed.

    `objects`: parts and packs of every save. `layouts`: keys of the layouts.
    """

    def packs(of: PackSet) -> Iterator[str]:
        return (entry.key for entry in objects.get(of.save, ()) if keys.pack_set(entry.key) == of)

    @cache
    def is_there(of: PackSet) -> bool:
        return next(packs(of), None) is not None

    @cache
    def ranks(of: PackSet) -> frozenset[int | None]:
        return frozenset(map(keys.pack_rank, packs(of)))

    def is_whole(save: SaveId, stand: Stand) -> bool:
        own = objects.get(save, ())
        parts = {rank for entry in own if (rank := keys.part_rank(entry.key)) is not None}
        nbytes = sum(entry.nbytes for entry in own if entry.key.startswith(keys.PACKS))
        return (
            len(parts) >= stand.world_size
            and nbytes >= stand.nbytes
            and all(ranks(of) >= stand.users[of] if of in stand.users else is_there(of) for of in stand.uses)
            and all(keys.layout_key(digest) in layouts for digest in stand.layouts)
        )

    return {save for save, stand in stands.items() if not is_whole(save, stand)}
