"""Boxes: axis-aligned regions in a tensor's global coordinates.

Pure integers: no torch, no I/O. A 0-d tensor is the box with no dims, which holds one element.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from ckptlib.errors import FormatError


class Box(NamedTuple):  # there may be hundreds of thousands: made in 0.6 and hashed in 0.45 of a dataclass's time
    """Half-open region `offset[d] <= index[d] < offset[d] + shape[d]` for every dim d."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Returns the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for 0-d."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Returns the common region, or None if it would be empty."""
        offset, shape = [], []
        for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if low >= high:
                return None
            offset.append(low)
            shape.append(high - low)
        return Box(tuple(offset), tuple(shape))

    def within(self, outer: Box) -> bool:
        """Returns whether every element lies in `outer`."""
        return all(
            b <= a and a + n <= b + m
            for a, n, b, m in zip(self.offset, self.shape, outer.offset, outer.shape, strict=True)
        )

    def relative_to(self, origin: Sequence[int]) -> Box:
        """Returns the same region in coordinates that start at `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Returns the index of this region in an array whose origin is the coordinates' origin."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))

    def split(self, most: int) -> Iterator[Box]:
        """Yields pieces of at most `most` elements (at least one), each a run of this box, in row-major order."""
        if self.numel <= most:
            yield self
            return
        dim = next(d for d, n in enumerate(self.shape) if n > 1)
        rows = max(most * self.shape[dim] // self.numel, 1)
        for start in range(0, self.shape[dim], rows):
            offset = (*self.offset[:dim], self.offset[dim] + start, *self.offset[dim + 1 :])
            shape = (*self.shape[:dim], min(rows, self.shape[dim] - start), *self.shape[dim + 1 :])
            yield from Box(offset, shape).split(most)

    def flat_range(self, inside: Sequence[int]) -> tuple[int, int]:
        """Returns the first and last + 1 flat (row-major) index that this region touches in an array of shape `inside`.

        Returns (0, 0) for an empty region, which touches none.
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


class Run(NamedTuple):
    """A run of elements that are contiguous in two arrays."""

    first: int
    """Flat index of the first element in one array."""
    at: int
    """Flat index of the first element in the other array."""
    numel: int


def common_run(one: Box, other: Box) -> Run | None:
    """Returns the common region of two boxes if it is one row-major run of elements in each of them; None otherwise."""
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


CELLS_PER_BOX = 16
"""A grid of at most this many cells per box that cuts it is examined cell by cell; a larger one is halved first."""

MAX_CUT_DIMS = 6
"""The most dims that boxes may cut in a grid that is examined cell by cell: a box has 2 ** dims corners."""

MAX_WORK = 5 * 2**18
"""Boxes times dims that searches examine before they give up, in about half a second. Halves of halves of ten thousand
boxes that do not overlap take a sixth of it; only boxes that were cut to be hard need more."""

WORK_PER_BOX = 4
"""Further work allowed for each box that a search begins with: it examines a grid, with halos or without, once."""

_NODE_WORK = 64


class Effort:
    """The work that searches may still do. Those of one document share it, for it may have hundreds of hard tensors."""

    def __init__(self) -> None:
        self.left = MAX_WORK


FEW = 8
"""Up to this many boxes are compared pairwise, which is quicker."""


def find_hole(outer: Box, pieces: Sequence[Box], effort: Effort | None = None) -> Box | None:
    """Returns a region of `outer` that no piece covers, or None if the pieces cover it.

    Raises FormatError if that takes more than what is left of `effort`, or MAX_WORK without one.
    """
    if outer.numel == 0 or any(outer.within(piece) for piece in pieces):
        return None
    if len(pieces) <= FEW and _tile(outer, pieces):
        return None
    return _search(outer, pieces, effort or Effort())


def _tile(outer: Box, pieces: Sequence[Box]) -> bool:
    """Returns whether pieces that do not overlap are as large as `outer` together. Quick, and true of most tensors."""
    clipped = [common for piece in pieces if (common := piece.intersect(outer)) is not None]
    return sum(piece.numel for piece in clipped) == outer.numel and all(
        one.intersect(other) is None for one, other in itertools.combinations(clipped, 2)
    )


def _search(outer: Box, pieces: Sequence[Box], effort: Effort) -> Box | None:
    """Returns a region that no piece covers, or None.

    Halves `outer` where the pieces of both halves are fewest, until a half is clear or its grid is small. A grid of all
    edges at once has their number to the power of the dims: a thousand boxes in 4 dims would take half a terabyte.
    """
    ndim = outer.ndim
    low = np.array([piece.offset for piece in pieces], dtype=np.int64).reshape(len(pieces), ndim)
    high = low + np.array([piece.shape for piece in pieces], dtype=np.int64).reshape(len(pieces), ndim)
    first = np.array(outer.offset, dtype=np.int64)
    todo = [(first, first + np.array(outer.shape, dtype=np.int64), low, high)]
    effort.left += WORK_PER_BOX * (len(low) + _NODE_WORK) * max(ndim, 1)
    while todo:
        first, last, low, high = todo.pop()
        effort.left -= (len(low) + _NODE_WORK) * max(ndim, 1)
        if effort.left < 0:
            raise FormatError(f"{len(pieces):,} boxes cut {outer} too finely to tell whether they cover it")
        low, high = np.maximum(low, first), np.minimum(high, last)
        inside = (low < high).all(axis=1)
        low, high = low[inside], high[inside]
        if not len(low):
            return _box(first, last)
        if ((low == first) & (high == last)).all(axis=1).any():
            continue
        edges = [
            np.unique(np.concatenate([low[:, d], high[:, d], first[d : d + 1], last[d : d + 1]])) for d in range(ndim)
        ]
        counts = _grid(edges, low, high)
        if counts is None:
            todo += _halves(edges, first, last, low, high)
        elif (found := _cell(edges, counts == 0)) is not None:
            return found
    return None


def _halves(
    edges: list[np.ndarray], first: np.ndarray, last: np.ndarray, low: np.ndarray, high: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Returns both sides of the middle edge of the dim where the fuller side holds the fewest pieces."""
    best: tuple[int, int, int] | None = None
    for d, along in enumerate(edges):
        if len(along) > 2:
            middle = int(along[len(along) // 2])
            fuller = max(int((low[:, d] < middle).sum()), int((high[:, d] > middle).sum()))
            best = min(best or (fuller, d, middle), (fuller, d, middle))
    assert best is not None, "without an edge inside, every piece is the whole"
    _, d, middle = best
    left_last, right_first = last.copy(), first.copy()
    left_last[d] = right_first[d] = middle
    left, right = low[:, d] < middle, high[:, d] > middle
    return [(first, left_last, low[left], high[left]), (right_first, last, low[right], high[right])]


def _grid(edges: list[np.ndarray], low: np.ndarray, high: np.ndarray) -> np.ndarray | None:
    """Counts the pieces over each cell between the edges; returns None if the grid is too large to examine."""
    if math.prod(len(along) for along in edges) > CELLS_PER_BOX * (len(low) + _NODE_WORK):
        return None
    cut = [d for d, along in enumerate(edges) if len(along) > 2]
    if len(cut) > MAX_CUT_DIMS:
        return None
    ends = [[np.searchsorted(along, corner[:, d]) for corner in (low, high)] for d, along in enumerate(edges)]
    counts = np.zeros([len(along) for along in edges], dtype=np.int32)
    for corner in itertools.product(
        (0, 1), repeat=len(cut)
    ):  # where each piece begins and ends; then sums along each dim
        at = [np.zeros(len(low), dtype=np.int64)] * len(edges)
        for d, end in zip(cut, corner, strict=True):
            at[d] = ends[d][end]
        np.add.at(counts, tuple(at), -1 if sum(corner) % 2 else 1)
    for d in cut:
        np.cumsum(counts, axis=d, out=counts)
    return counts[(slice(-1),) * len(edges)]


def _cell(edges: list[np.ndarray], chosen: np.ndarray) -> Box | None:
    """Returns the first of the chosen cells, or None."""
    if not chosen.any():
        return None
    index = [int(i) for i in np.unravel_index(int(chosen.argmax()), chosen.shape)]
    low = [along[i] for along, i in zip(edges, index, strict=True)]
    high = [along[i + 1] for along, i in zip(edges, index, strict=True)]
    return _box(np.array(low), np.array(high))


def _box(first: np.ndarray, last: np.ndarray) -> Box:
    return Box(tuple(first.tolist()), tuple((last - first).tolist()))
