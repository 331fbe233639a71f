"""A whole slot's body as packs, by the writer's own planning."""

from __future__ import annotations

from typing import NamedTuple

from ckptlib.format.layout import Layout
from ckptlib.format.table import Table
from ckptlib.writer.packs import Packer, PackShape


class Packed(NamedTuple):
    packs: tuple[PackShape, ...]
    table: Table
    """Which says where the chunks lie in the packs."""


def pack(table: Table, layout: Layout, pack_nbytes: int, chunks: tuple[int, ...] | None = None) -> Packed:
    """Of a slot with this table: all of its chunks, or some; the others lie nowhere."""
    some = tuple(range(len(table.nbytes))) if chunks is None else chunks
    packing = Packer(table, layout, pack_nbytes).pack(some)
    numbers, offsets = [-1] * len(table.nbytes), [-1] * len(table.nbytes)
    for chunk, number, offset in zip(some, packing.numbers, packing.offsets, strict=True):
        numbers[chunk], offsets[chunk] = number, offset
    return Packed(packing.packs, table.placed(numbers, offsets))


def data_of(shape: PackShape, body: bytes | bytearray) -> bytes:
    """What follows the header."""
    return b"".join(bytes(body[start:stop]) for start, stop in shape.pieces)
