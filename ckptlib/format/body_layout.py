"""Who writes what, and where it lies. Pure: no torch, no I/O.

Every function here gives the same answer on every rank that asks about the same tensors, so nothing is gathered.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from ckptlib.format import dtypes, sharding
from ckptlib.format.box import Box
from ckptlib.format.layout import Layout, Placed, TensorEntry
from ckptlib.format.table import Table, shard_nbytes
from ckptlib.pages import round_up

ALIGN_FROM_BYTES = 256 * 1024
"""Shards from this size on begin on a page of their own, and so do blocks of smaller ones; the gap costs them less than
1.6 %."""

CHUNK_BYTES = 4 * 1024 * 1024
"""Digests are kept per chunk, and a chunk is read whole: smaller ones cost metadata, larger ones read amplification."""

PARTS, SMALLEST_CHUNK_BYTES = 8, 256 * 1024
"""A shard is cut into up to so many equal parts, where they are no smaller than that: a job of twice, four or eight
times as many ranks wants halves, quarters or eighths of it, and then reads no byte too many (1.83 times before); where
nothing divides, no more than a part at each end."""

SHARED_CHUNK_BYTES = 64 * 1024
"""Small shards that lie side by side share a chunk of up to this size: a digest, a row and a call for each would cost
more than their bytes, and whoever reads one of them reads no more than what one request costs anyway."""


def assign(entries: Iterable[TensorEntry], partial: Container[str] = ()) -> list[TensorEntry]:
    """The entries, each with the writer of its replicas.

    Balanced by local bytes, largest first, among the tensors of the same mesh and replicating axes: whoever holds one
    of those holds all of them, so all holders come to the same answer.

    `partial`: names that not all ranks of their mesh have. Who writes those no coordinate tells; see `writes`.
    """
    queues: dict[object, list[tuple[int, tuple[int, ...]]]] = {}
    writers: dict[str, TensorEntry] = {}
    entries = list(entries)
    for entry in sorted(entries, key=lambda e: (-e.nbytes_global, e.name)):
        holding = entry.holding
        if not isinstance(holding, Placed) or entry.name in partial:
            continue
        axes = sharding.replica_axes(holding.placements)
        key = (holding.mesh, axes)
        queue = queues.get(key)
        if queue is None:
            queue = queues[key] = [(0, at) for at in _coordinates(holding.mesh.shape, axes)]
        load, at = heapq.heappop(queue)
        heapq.heappush(queue, (load + entry.nbytes_global + 1, at))
        writers[entry.name] = replace(entry, holding=replace(holding, writer=at))
    return [writers.get(entry.name, entry) for entry in entries]


def _coordinates(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Every coordinate on the given axes, 0 on all others; ascending, hence a valid heap."""
    found: list[tuple[int, ...]] = [()]
    for axis, size in enumerate(shape):
        steps = range(size) if axis in axes else range(1)
        found = [(*at, i) for at in found for i in steps]
    return found


def writes(entry: TensorEntry, rank: int, holders: frozenset[int] | None = None) -> bool:
    """Whether a rank writes its boxes of a tensor.

    `holders`: the ranks that really hold it, where these are fewer than its mesh; the first of each set of replicas
    writes then.
    """
    holding = entry.holding
    if not isinstance(holding, Placed):
        return True
    coordinate = holding.mesh.coordinate(rank)
    if coordinate is None:
        return False
    if holders is not None:
        return rank == min(holders_of(holding, rank, holders), default=None)
    if holding.writer is None:
        return True
    return all(coordinate[a] == holding.writer[a] for a in sharding.replica_axes(holding.placements))


def holders_of(holding: Placed, rank: int, holders: frozenset[int] | None = None) -> tuple[int, ...]:
    """The ranks that hold the same boxes as `rank`, itself among them, ascending. `holders`: see `writes`."""
    coordinate = holding.mesh.coordinate(rank)
    if coordinate is None:
        return ()
    axes = sharding.replica_axes(holding.placements)
    mine = {a: c for a, c in enumerate(coordinate) if a not in axes}
    places = _coordinates(holding.mesh.shape, axes)
    ranks = (holding.mesh.rank(tuple(mine.get(a, c) for a, c in enumerate(at))) for at in places)
    return tuple(sorted(r for r in ranks if holders is None or r in holders))


def lay_out(layout: Layout, shards: Sequence[tuple[str, Box]], chunk_bytes: int = CHUNK_BYTES) -> Table:
    """Where each shard lies in a slot's body, which is also the body of the pack made of it.

    Large shards come first, each on a page of its own; the rest follows in blocks that begin on a page and have no
    gaps, widest elements first, so that each is aligned to its element. The smallest of them share chunks. Offsets
    count from the body's first byte; all chunks are in pack 0.
    """
    sized = []
    for name, box in shards:
        entry = layout.tensors[layout.index[name]]
        sized.append((entry, box, shard_nbytes(entry, box)))
    large = sorted((s for s in sized if s[2] >= ALIGN_FROM_BYTES), key=lambda s: (s[0].name, s[1].offset))
    small = sorted(
        (s for s in sized if s[2] < ALIGN_FROM_BYTES),
        key=lambda s: (-dtypes.itemsize(s[0].dtype), s[0].name, s[1].offset),
    )
    offsets: list[int] = []
    sizes: list[int] = []
    counts: list[int] = []
    end = 0
    for _, _, nbytes in large:
        counts.append(_add_chunks(round_up(end), nbytes, chunk_bytes, offsets, sizes))
        end = offsets[-1] + sizes[-1]
    end = block = round_up(end)
    shared_bytes, room = min(SHARED_CHUNK_BYTES, chunk_bytes), 0
    for _, _, nbytes in small:
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
    ordered = large + small
    return Table(
        layout=layout.digest,
        tensors=tuple(layout.index[entry.name] for entry, _, _ in ordered),
        boxes=tuple(box for _, box, _ in ordered),
        num_chunks=tuple(counts),
        packs=(0,) * len(offsets),
        offsets=tuple(offsets),
        nbytes=tuple(sizes),
    )


def _add_chunks(start: int, nbytes: int, chunk_bytes: int, offsets: list[int], sizes: list[int]) -> int:
    """Cuts a shard that begins at `start`; returns the number of its chunks."""
    before, each = len(offsets), _chunk_nbytes(nbytes, chunk_bytes)
    for first in range(0, nbytes, each):
        offsets.append(start + first)
        sizes.append(min(each, nbytes - first))
    return len(offsets) - before


def _chunk_nbytes(nbytes: int, at_most: int) -> int:
    """Of each chunk of a shard but its last: an even part of it, in whole pages."""
    num = 1
    while nbytes > num * at_most or (num < PARTS and nbytes >= 2 * num * SMALLEST_CHUNK_BYTES):
        num *= 2
    return nbytes if num == 1 else min(round_up(-(-nbytes // num)), at_most)


def body_nbytes(table: Table) -> int:
    """Bytes of the body of a slot laid out so: whole pages."""
    return round_up(max((o + n for o, n in zip(table.offsets, table.nbytes, strict=True)), default=0))
