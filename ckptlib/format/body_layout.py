"""Where each shard lies in the body of a slot, and how it is cut into chunks. Pure: no torch, no I/O.

`saving/assign` decides which shards a rank writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ckptlib.format import dtypes
from ckptlib.format.box import Box
from ckptlib.format.layout import Layout
from ckptlib.format.table import Table, shard_nbytes
from ckptlib.pages import round_up

ALIGN_FROM_BYTES = 256 * 1024
"""Shards of at least this size begin on a page of their own, and so do blocks of smaller ones. The gap costs at most
1.6 % of their size."""

CHUNK_BYTES = 4 * 1024 * 1024
"""Size of the largest chunks. Digests are kept per chunk, and a chunk is read whole: smaller chunks cost metadata,
larger ones read amplification."""

PARTS, SMALLEST_CHUNK_BYTES = 8, 256 * 1024
"""A shard is cut into up to PARTS equal parts of at least SMALLEST_CHUNK_BYTES each. A job of two, four or eight times
as many ranks wants halves, quarters or eighths of a shard, and then reads no byte too many (with chunks of CHUNK_BYTES
alone, 1.83 times what it needs). If the sizes do not divide, it reads at most a part too many at each end."""

SHARED_CHUNK_BYTES = 64 * 1024
"""Small shards that lie side by side share a chunk of up to this size. A digest, a row and a call for each would cost
more than their bytes, and reading one of them reads no more than what one request costs anyway."""


def lay_out(layout: Layout, shards: Sequence[tuple[str, Box]], chunk_bytes: int = CHUNK_BYTES) -> Table:
    """Returns the table of where each shard lies in a slot's body, which is also the body of the pack made of it.

    Large shards come first, each on a page of its own; the rest follows in blocks that begin on a page and have no
    gaps, widest elements first, so that each is aligned to its element. The smallest of them share chunks. Offsets
    count from the body's first byte; all chunks are in pack 0.
    """
    return lay_out_in_order(layout, [(layout.index[name], box) for name, box in shards], chunk_bytes)[0]


def lay_out_in_order(
    layout: Layout, shards: Sequence[tuple[int, Box]], chunk_bytes: int = CHUNK_BYTES
) -> tuple[Table, list[int]]:
    """Does what `lay_out` does, for tensors given by their positions in the layout. Also returns, for each shard of the
    table, its position in `shards`."""
    large, small = _sorted_shards(layout, shards)
    offsets: list[int] = []
    sizes: list[int] = []
    counts: list[int] = []
    end = 0
    for *_, nbytes in large:
        counts.append(_add_chunks(round_up(end), nbytes, chunk_bytes, offsets, sizes))
        end = offsets[-1] + sizes[-1]
    end = block = round_up(end)
    shared_bytes, room = min(SHARED_CHUNK_BYTES, chunk_bytes), 0
    for *_, nbytes in small:
        if end - block >= ALIGN_FROM_BYTES:  # a pack can only be cut where a page begins
            end = block = round_up(end)
            room = 0
        if nbytes <= room:
            counts.append(0)
            sizes[-1] += nbytes
        else:
            counts.append(_add_chunks(end, nbytes, chunk_bytes, offsets, sizes))
            room = shared_bytes
        room -= nbytes
        end += nbytes
    order = [i for *_, i, _ in large + small]
    placed = [shards[i] for i in order]
    table = Table(
        layout=layout.digest,
        tensors=tuple([tensor for tensor, _ in placed]),
        boxes=tuple([box for _, box in placed]),
        num_chunks=tuple(counts),
        packs=(0,) * len(offsets),
        offsets=tuple(offsets),
        nbytes=tuple(sizes),
    )
    return table, order


_Sized: TypeAlias = tuple[int, int, tuple[int, ...], int, int]
"""A shard for sorting: three sort keys (minus its element size or 0, tensor, offset), its position, and its bytes."""


def _sorted_shards(layout: Layout, shards: Sequence[tuple[int, Box]]) -> tuple[list[_Sized], list[_Sized]]:
    """Returns the sorted large shards and the sorted small ones. The small ones are sorted by the size of their
    elements first. Tensors are in order of their names because a layout sorts them."""
    large: list[_Sized] = []
    small: list[_Sized] = []
    known: dict[tuple[int, str], int] = {}  # boxes that are equal are mostly one object
    itemsize = {dtype: dtypes.itemsize(dtype) for dtype in {entry.dtype for entry in layout.tensors}}
    for i, (tensor, box) in enumerate(shards):
        entry = layout.tensors[tensor]
        kind = id(box), entry.dtype
        nbytes = known.get(kind)
        if nbytes is None:
            nbytes = known[kind] = shard_nbytes(entry, box)
        if nbytes >= ALIGN_FROM_BYTES:
            large.append((0, tensor, box.offset, i, nbytes))
        else:
            small.append((-itemsize[entry.dtype], tensor, box.offset, i, nbytes))
    return sorted(large), sorted(small)


def _add_chunks(start: int, nbytes: int, chunk_bytes: int, offsets: list[int], sizes: list[int]) -> int:
    """Appends the chunks of a shard that begins at `start`; returns how many."""
    before, each = len(offsets), _chunk_nbytes(nbytes, chunk_bytes)
    for first in range(0, nbytes, each):
        offsets.append(start + first)
        sizes.append(min(each, nbytes - first))
    return len(offsets) - before


def _chunk_nbytes(nbytes: int, at_most: int) -> int:
    """Returns the bytes of each chunk of a shard but the last: an even part of the shard, in whole pages."""
    num = 1
    while nbytes > num * at_most or (num < PARTS and nbytes >= 2 * num * SMALLEST_CHUNK_BYTES):
        num *= 2
    return nbytes if num == 1 else min(round_up(-(-nbytes // num)), at_most)


def body_nbytes(table: Table) -> int:
    """Returns the bytes of the body of a slot with this layout, in whole pages."""
    return round_up(max((o + n for o, n in zip(table.offsets, table.nbytes, strict=True)), default=0))
