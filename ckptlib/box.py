"""Boxes: axis-aligned regions in a tensor's global coordinates.

Pure integers: no torch, no I/O. A 0-d tensor is the box with no dims, which holds one element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from typing_extensions import override


@dataclass(frozen=True, slots=True)
class Box:
    """Half-open region `offset[d] <= index[d] < offset[d] + shape[d]` for every dim d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for 0-d."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None where it would be empty."""
        offset, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            offset.append(low)
            shape.append(high - low)
        return Box(tuple(offset), tuple(shape))

    def within(self, outer: Box) -> bool:
        """Whether every element lies in `outer`."""
        return all(
            b <= a and a + n <= b + m
            for a, n, b, m in zip(self.offset, self.shape, outer.offset, outer.shape, strict=True)
        )

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same region in coordinates that start at `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Index of this region in an array whose origin is the coordinates' origin."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))

    def flat_range(self, inside: Sequence[int]) -> tuple[int, int]:
        """First and last + 1 flat (row-major) index that this region touches in an array of shape `inside`.

        (0, 0) for an empty region, which touches none.
        """
        if self.numel == 0:
            return 0, 0
        first = last = 0
        for a, n, size in zip(self.offset, self.shape, inside, strict=True):
            first = first * size + a
            last = last * size + a + n - 1
        return first, last + 1

    @override
    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.shape, strict=True)) + "]"


@dataclass(frozen=True, slots=True)
class Run:
    """Elements that follow one another in two arrays."""

    first: int
    """Flat index of their first in one array."""
    at: int
    """And in the other."""
    numel: int


def common_run(one: Box, other: Box) -> Run | None:
    """What two boxes have in common, where that is one run of elements in each of them, row-major; None elsewhere."""
    common = one.intersect(other)
    if common is None:
        return None
    first, last = common.relative_to(one.offset).flat_range(one.shape)
    at, end = common.relative_to(other.offset).flat_range(other.shape)
    return Run(first, at, common.numel) if last - first == end - at == common.numel else None


def boxes_of_range(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[int, Box]]:
    """Cuts the flat, row-major range [first, last) of an array into boxes.

    Yields (flat index of the box's first element, box) in ascending order; each box is contiguous in the
    array, and there are at most 2 * ndim - 1 of them.
    """
    if first >= last:
        return
    if not shape:
        yield 0, Box((), ())
        return
    row = math.prod(shape[1:])
    inner = tuple(shape[1:])
    head, body_first = divmod(first, row)
    tail, body_last = divmod(last, row)
    if body_first:  # a row that is entered in its middle
        stop = body_last if tail == head else row
        yield from _in_row(head, inner, body_first, stop, head * row)
        head += 1
    if head < tail:
        yield head * row, Box((head, *(0,) * len(inner)), (tail - head, *inner))
    if body_last and head <= tail:  # a row that is left in its middle
        yield from _in_row(tail, inner, 0, body_last, tail * row)


def _in_row(row: int, inner: tuple[int, ...], first: int, last: int, base: int) -> Iterator[tuple[int, Box]]:
    for flat, box in boxes_of_range(inner, first, last):
        yield base + flat, Box((row, *box.offset), (1, *box.shape))


def find_hole(outer: Box, pieces: Sequence[Box]) -> Box | None:
    """A region of `outer` that no piece covers, or None when the pieces cover it."""
    if outer.numel == 0 or any(outer.within(piece) for piece in pieces):
        return None
    edges, counts = _grid(outer, pieces)
    return _cell(edges, counts == 0)


def find_overlap(outer: Box, pieces: Sequence[Box]) -> Box | None:
    """A region of `outer` that two pieces cover, or None when they are disjoint inside it."""
    if outer.numel == 0 or len(pieces) < 2:
        return None
    edges, counts = _grid(outer, pieces)
    return _cell(edges, counts > 1)


def _grid(outer: Box, pieces: Sequence[Box]) -> tuple[list[list[int]], np.ndarray]:
    """Cuts `outer` along every edge of every piece: the edges by dim, and how many pieces lie over each cell."""
    clipped = [c for p in pieces if (c := p.intersect(outer)) is not None]
    edges = [
        sorted({a, a + n, *(c.offset[d] for c in clipped), *(c.offset[d] + c.shape[d] for c in clipped)})
        for d, (a, n) in enumerate(zip(outer.offset, outer.shape, strict=True))
    ]
    counts = np.zeros([len(e) - 1 for e in edges], dtype=np.int32)
    position = [{edge: i for i, edge in enumerate(e)} for e in edges]
    for c in clipped:
        region = tuple(
            slice(position[d][a], position[d][a + n]) for d, (a, n) in enumerate(zip(c.offset, c.shape, strict=True))
        )
        counts[region] += 1
    return edges, counts


def _cell(edges: list[list[int]], chosen: np.ndarray) -> Box | None:
    """The first of the chosen cells."""
    if not chosen.any():
        return None
    index = [int(i) for i in np.unravel_index(int(chosen.argmax()), chosen.shape)]
    low = tuple(edges[d][i] for d, i in enumerate(index))
    return Box(low, tuple(edges[d][i + 1] - edges[d][i] for d, i in enumerate(index)))
