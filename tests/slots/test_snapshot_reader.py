"""What a reader of snapshots makes of a slot's documents, and what it keeps from one snapshot to the next."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.memory_slots import MemorySlot, memory_slot

from ckptlib.errors import FormatError
from ckptlib.format.digests import HEX_WIDTH, XXH3, digester
from ckptlib.format.documents import encode
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.pages import PAGE_BYTES
from ckptlib.slots.snapshot import SnapshotReader, check_body

GENERATION = GenerationId(1, "0123abcd")


def slot_of(step: int, **arrays: np.ndarray) -> MemorySlot:
    return memory_slot(SaveId(step, GENERATION), 0, arrays)


def test_a_state_that_changes_from_one_save_to_the_next() -> None:
    """The table of the save before says where other tensors lie."""
    reader = SnapshotReader()
    for step, arrays in enumerate(
        (
            {"w": np.zeros(3000, np.float32)},
            {"w": np.ones(3000, np.float32)},
            {"w": np.zeros(100, np.float32), "v": np.zeros(7)},
        )
    ):
        slot = slot_of(step, **arrays)
        snapshot = reader.read(slot, slot.read_header())
        entries = {entry.name: entry.shape for entry in snapshot.layout.tensors}
        assert entries == {name: array.shape for name, array in arrays.items()}
        assert snapshot.table.layout == snapshot.layout.digest
        check_body(slot, snapshot)


@pytest.mark.parametrize("digits", [-HEX_WIDTH, -1, 1, HEX_WIDTH])
def test_digests_for_more_or_fewer_chunks(digits: int) -> None:
    slot = slot_of(1, w=np.zeros(3000, np.float32))
    found = SnapshotReader().read(slot, slot.read_header())
    digests = ("".join(found.digests) + "0" * HEX_WIDTH)[: HEX_WIDTH * len(found.digests) + digits]
    fields = {"created": 0.0, "algorithm": XXH3, "digests": digests, "metrics": {}, "values": {}}
    document, data = encode("snapshot", fields), bytearray(slot.view(0, slot.end))
    place = len(data), len(document), digester(XXH3)(document)
    header = replace(slot.read_header(), documents={**slot.read_header().documents, "snapshot": place})
    data[:PAGE_BYTES] = header.encode()
    with pytest.raises(FormatError, match=f"{len(digests)} hex digits of digests for {len(found.digests)} chunks"):
        SnapshotReader().read(MemorySlot(header, data + document), header)
