"""Which rank writes a tensor that several of them hold. Pure: no torch, no I/O.

Every rank that asks about the same tensors gets the same answer, so nothing is gathered.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable
from dataclasses import replace

from ckptlib.format import sharding
from ckptlib.format.layout import Placed, TensorEntry


def assign(entries: Iterable[TensorEntry], partial: Container[str] = ()) -> list[TensorEntry]:
    """The entries, each with the writer of its replicas.

    Balanced by local bytes, largest first, among the tensors of the same mesh and replicating axes: a rank that holds
    one of those holds all of them, so all holders come to the same answer.

    `partial`: names that not all ranks of their mesh have. No coordinate tells their writer; see `writes`.
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
