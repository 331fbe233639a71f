"""The names of a save's parts, as the catalog lists them."""

from __future__ import annotations

from ckptlib.catalog.catalog import Catalog
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.stores.memory import MemoryStore

SAVE = SaveId(7, GenerationId(1, "0" * 8))


def name(rank: int, attempt: str, ok: bool = True, save: SaveId = SAVE) -> PartName:
    return PartName(save, rank, attempt, "1" * 32 if ok else None, "2" * 32)


def test_attempts_of_a_rank_are_in_order_and_nothing_else_is_listed() -> None:
    store = MemoryStore("names")
    names = [name(2, "b" * 8), name(0, "c" * 8), name(2, "a" * 8, ok=False), name(1, "d" * 8)]
    other = name(0, "e" * 8, save=SaveId(7, GenerationId(1, "1" * 8)))
    for one in (*names, other):
        store.put(one.key, b"")
    store.put(f"{SAVE.parts_prefix}notes.txt", b"")
    assert Catalog(store).parts(SAVE) == {0: [names[1]], 1: [names[3]], 2: [names[2], names[0]]}
