"""Coordinates on a mesh, and every way to place a tensor on one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from ckptlib.format.sharding import (
    Placement,
    Replicate,
    Shard,
    StridedShard,
)

Shape = tuple[int, ...]


def coordinates(mesh_shape: Shape) -> Iterator[Shape]:
    return itertools.product(*map(range, mesh_shape))


def placements_of(ndim: int, mesh_shape: Shape) -> Iterator[tuple[Placement, ...]]:
    """Every combination, with split factors that later mesh axes can explain, and on small meshes others too."""
    yield from itertools.product(*(kinds_of(ndim, mesh_shape, axis) for axis in range(len(mesh_shape))))


def kinds_of(ndim: int, mesh_shape: Shape, axis: int) -> list[Placement]:
    later = mesh_shape[axis + 1 :]
    factors = {math.prod(some) for n in range(1, len(later) + 1) for some in itertools.combinations(later, n)}
    if len(mesh_shape) < 3:
        factors |= {2, 3}
    kinds: list[Placement] = [Replicate()]
    for dim in range(ndim):
        kinds += [Shard(dim), *(StridedShard(dim, factor) for factor in sorted(factors))]
    return kinds
