"""Which rank writes a tensor that several of them hold. Pure: no torch, no I/O.

Every rank that asks about the same tensors gets the same answer, so nothing is gathered.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Container, Iterable
from dataclasses import replace
from typing import TypeAlias

from ckptlib.format import sharding
from ckptlib.format.layout import Mesh, Placed, TensorEntry


def assign(entries: Iterable[TensorEntry], partial: Container[str] = ()) -> list[TensorEntry]:
    """The entries, each with the writer of its replicas.

    Balanced by local bytes, largest first, among the tensors of the same mesh and replicating axes: a rank that holds
    one of those holds all of them, so all holders come to the same answer.

    `partial`: names that not all ranks of their mesh have. No coordinate tells their writer; see `writes`.
    """
    entries = list(entries)  # keeps the holdings, which are known by id: they are few, and slow to compare
    queues = _queues_of(entries)
    order: Iterable[int] = range(len(entries))
    if any(len(queue) > 1 for queue in queues.values()):
        sizes = [entry.nbytes_global for entry in entries]
        order = [i for *_, i in sorted(zip(map(operator.neg, sizes), map(_name, entries), order, strict=True))]
    written: dict[tuple[int, Coordinate], Placed] = {}
    assigned = list(entries)
    for i in order:
        entry, holding = entries[i], entries[i].holding
        if not isinstance(holding, Placed) or entry.name in partial:
            continue
        queue = queues[id(holding)]
        load, at = queue[0]
        if len(queue) > 1:
            heapq.heapreplace(queue, (load + sizes[i] + 1, at))
        key = id(holding), at
        held = written.get(key) or written.setdefault(key, replace(holding, writer=at))
        assigned[i] = TensorEntry(entry.name, entry.dtype, entry.shape, held)
    return assigned


Coordinate: TypeAlias = tuple[int, ...]

_Queue: TypeAlias = list[tuple[int, Coordinate]]
"""A heap of coordinates, each with the bytes that it writes so far."""


def _queues_of(entries: Iterable[TensorEntry]) -> dict[int, _Queue]:
    """By id of holding; one for all of the same mesh and replicating axes."""
    queues: dict[tuple[Mesh, tuple[int, ...]], _Queue] = {}
    found: dict[int, _Queue] = {}
    for holding in {id(entry.holding): entry.holding for entry in entries}.values():
        if isinstance(holding, Placed):
            axes = sharding.replica_axes(holding.placements)
            start = [(0, at) for at in _coordinates(holding.mesh.shape, axes)]
            found[id(holding)] = queues.setdefault((holding.mesh, axes), start)
    return found


_name = operator.attrgetter("name")


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
