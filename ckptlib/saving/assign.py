"""Chooses which rank writes a tensor that several of them hold. Pure: no torch, no I/O.

Every rank that asks about the same tensors gets the same answer, so nothing is gathered.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from typing import TypeAlias

from ckptlib.format import sharding
from ckptlib.format.layout import Holding, Mesh, Placed, TensorEntry, TensorSpec


def assign(
    tensors: Iterable[TensorSpec], holdings: Mapping[str, Holding], partial: Container[str] = ()
) -> list[TensorEntry]:
    """Returns a layout's entries, sorted by name, for the tensors that have a holding, each with the writer of its
    replicas.

    The choice balances local bytes, largest first, among the tensors of the same mesh and replicating axes: a rank that
    holds one of those holds all of them, so all holders come to the same answer.

    `partial`: names that not all ranks of their mesh have. Their writer is given by no coordinate; see `writes`.
    """
    tensors = sorted((tensor for tensor in tensors if tensor.name in holdings), key=_name)
    held = [holdings[tensor.name] for tensor in tensors]
    queues = _queues_of(held)
    order: Iterable[int] = range(len(tensors))
    if any(len(queue) > 1 for queue in queues.values()):
        sizes = [tensor.nbytes_global for tensor in tensors]
        order = sorted(order, key=[*map(operator.neg, sizes)].__getitem__)  # stable: ties keep the order of the names
    written: dict[tuple[int, Coordinate], Placed] = {}  # by id of holding: there are few, and they are slow to compare
    for i in order:
        holding = held[i]
        if not isinstance(holding, Placed) or tensors[i].name in partial:
            continue
        queue = queues[id(holding)]
        load, at = queue[0]
        if len(queue) > 1:
            heapq.heapreplace(queue, (load + sizes[i] + 1, at))
        key = id(holding), at
        held[i] = written.get(key) or written.setdefault(key, replace(holding, writer=at))
    return [
        TensorEntry(tensor.name, tensor.dtype, tensor.shape, how) for tensor, how in zip(tensors, held, strict=True)
    ]


Coordinate: TypeAlias = tuple[int, ...]

_Queue: TypeAlias = list[tuple[int, Coordinate]]
"""A heap of coordinates, each with the number of bytes that it writes so far."""


def _queues_of(holdings: Iterable[Holding]) -> dict[int, _Queue]:
    """Returns the queue of each holding, by its id. Holdings with the same mesh and replicating axes share one."""
    queues: dict[tuple[Mesh, tuple[int, ...]], _Queue] = {}
    found: dict[int, _Queue] = {}
    for holding in {id(holding): holding for holding in holdings}.values():
        if isinstance(holding, Placed):
            axes = sharding.replica_axes(holding.placements)
            start = [(0, at) for at in _coordinates(holding.mesh.shape, axes)]
            found[id(holding)] = queues.setdefault((holding.mesh, axes), start)
    return found


_name = operator.attrgetter("name")


def _coordinates(shape: tuple[int, ...], axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns every coordinate on the given axes, with 0 on all others; ascending, hence a valid heap."""
    found: list[tuple[int, ...]] = [()]
    for axis, size in enumerate(shape):
        steps = range(size) if axis in axes else range(1)
        found = [(*at, i) for at in found for i in steps]
    return found


def writes(entry: TensorEntry, rank: int, holders: frozenset[int] | None = None) -> bool:
    """Returns whether a rank writes its boxes of a tensor.

    `holders`: the ranks that really hold it, if they are fewer than its mesh; then the first of each set of replicas
    writes.
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
    """Returns the ranks that hold the same boxes as `rank`, itself included, ascending. `holders`: see `writes`."""
    coordinate = holding.mesh.coordinate(rank)
    if coordinate is None:
        return ()
    axes = sharding.replica_axes(holding.placements)
    mine = {a: c for a, c in enumerate(coordinate) if a not in axes}
    places = _coordinates(holding.mesh.shape, axes)
    ranks = (holding.mesh.rank(tuple(mine.get(a, c) for a, c in enumerate(at))) for at in places)
    return tuple(sorted(r for r in ranks if holders is None or r in holders))
