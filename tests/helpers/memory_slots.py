"""Slots in this process's memory, as a stager leaves them: for what reads slots, without files and without torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from support import ROOT_ID, layout_of, shards_of
from typing_extensions import override

from ckptlib.format import body_layout
from ckptlib.format.check import compared
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.documents import encode
from ckptlib.format.keys import SaveId
from ckptlib.pages import PAGE_BYTES
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.readable import ReadableSlot

CHUNK_BYTES = 4096


class MemorySlot(ReadableSlot):
    """A ready slot; locks are always had."""

    def __init__(self, header: SlotHeader, data: bytearray) -> None:
        self.where = f"slot of {header.save}, rank {header.rank}"
        self.path = Path(self.where)
        self._header, self._data = header, data

    @property
    @override
    def capacity(self) -> int:
        return self._header.body_nbytes

    @property
    @override
    def end(self) -> int:
        return len(self._data)

    @property
    def body(self) -> memoryview:
        return memoryview(self._data)[PAGE_BYTES:]

    @override
    def read_at(self, at: int, buffer: memoryview) -> None:
        buffer[:] = self._data[at : at + len(buffer)]

    @override
    def view(self, at: int, nbytes: int) -> memoryview:
        return memoryview(self._data)[at : at + nbytes]

    def read_lock(self) -> bool:
        return True

    def unlock(self) -> None:
        pass


def memory_slot(
    save: SaveId,
    rank: int,
    arrays: Mapping[str, np.ndarray],
    world_size: int = 1,
    created: float = 0.0,
    number: int | None = None,
    algorithm: str = XXH3,
) -> MemorySlot:
    """One rank's share of a snapshot, ready. `number`: of the snapshot; None: as its step."""
    layout = layout_of(arrays, world_size)
    table = body_layout.lay_out(layout, shards_of(layout, rank), CHUNK_BYTES)
    nbytes = body_layout.body_nbytes(table)
    body = bytearray(nbytes)
    for tensor, box, begin in zip(table.tensors, table.boxes, table.begins(table.sizes(layout)), strict=True):
        raw = np.ascontiguousarray(arrays[layout.tensors[tensor].name][box.slices()]).tobytes()
        body[begin : begin + len(raw)] = raw
    digest = digester(algorithm)
    digests = "".join(digest(body[o : o + n]) for o, n in zip(table.offsets, table.nbytes, strict=True))
    fields = {"created": created, "algorithm": algorithm, "digests": digests, "metrics": {}, "values": {}}
    documents = {"layout": layout.encoded, "table": table.encoded.encode(), "snapshot": encode("snapshot", fields)}
    data, places = bytearray(PAGE_BYTES) + body, {}
    for name, document in documents.items():
        places[name] = (len(data), len(document), digester(XXH3)(document))
        data += document
    number = save.step if number is None else number
    header = SlotHeader(ROOT_ID, save, rank, world_size, number, 2, nbytes, places, compared(number))
    data[:PAGE_BYTES] = header.encode()
    return MemorySlot(header, data)
