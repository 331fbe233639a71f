"""A slot that is not what was sealed, or that somebody overwrites while it is persisted: no part tells of its bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.actors import ActorStore, Inline
from helpers.memory_slots import memory_slot
from support import make_generation, make_root

from ckptlib.errors import CorruptData, FormatError
from ckptlib.format import keys
from ckptlib.format.keys import SaveId
from ckptlib.pages import PAGE_BYTES
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer.persist import Persister


@pytest.mark.parametrize("ready", [True, False])
def test_what_was_right_when_it_was_checked_is_looked_at_once_more(ready: bool) -> None:
    """The check is over by then, as where the store is slow. `ready`: the other snapshot is whole by then."""
    store = MemoryStore()
    generation = make_generation(make_root(store))
    ours, others = (memory_slot(SaveId(step, generation), 0, {"w": np.full(3000, step, np.float32)}) for step in (1, 2))

    unready = replace(others.read_header(), sequence=3).encode()
    content = bytes(others.view(0, others.end)) if ready else unready + bytes(others.view(PAGE_BYTES, others.end))

    def overwrite(op: str, key: str) -> None:
        if op == "write" and key.startswith(keys.PACKS):
            ours.view(0, ours.end)[:] = content

    overtaken = ActorStore(store)
    overtaken.before = overwrite
    save = SaveId(1, generation)
    with pytest.raises(CorruptData, match="was overwritten while it was persisted"):
        Persister(overtaken, Inline(), 0, 1).persist(ours, save)  # type: ignore[arg-type]
    assert [*store.scan(keys.PACKS)], "the pack was under way"
    assert not [*store.scan(keys.PARTS)]


@pytest.mark.parametrize("at", [0, 4095, 4096, 11_999])
def test_a_byte_that_changed_in_memory_makes_no_part(at: int) -> None:
    store = MemoryStore()
    save = SaveId(1, make_generation(make_root(store)))
    slot = memory_slot(save, 0, {"w": np.zeros(3000, np.float32)})
    slot.body[at] ^= 1
    with pytest.raises(CorruptData, match=r"w.* changed in memory after it was sealed"):
        Persister(store, Inline(), 0, 1).persist(slot, save)  # type: ignore[arg-type]
    assert not [*store.scan(keys.PARTS)]


@pytest.mark.parametrize("sequence", [2, 3])
def test_another_snapshot_is_not_persisted_as_this_one(sequence: int) -> None:
    """`sequence`: odd where that one is still written."""
    store = MemoryStore()
    generation = make_generation(make_root(store))
    slot = memory_slot(SaveId(2 - sequence % 2, generation), 0, {"w": np.zeros(3000, np.float32)})
    slot.view(0, PAGE_BYTES)[:] = replace(slot.read_header(), sequence=sequence).encode()
    with pytest.raises(FormatError, match=r"expected 00.* and ready"):
        Persister(store, Inline(), 0, 1).persist(slot, SaveId(1, generation))  # type: ignore[arg-type]
    assert not [*store.scan(keys.PACKS)]
