"""Where boxes of one tensor overlap: which regions must be equal on several ranks, and which rank writes them.

Pure: no torch, no I/O.

Boxes that users cut by hand may overlap, as those of a grid with halos do. The lowest rank that holds an element writes
it. The others hold a replica, which every save has to prove equal, like any replica.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptlib.errors import UnsupportedState
from ckptlib.format.box import Box

MAX_PAIRS = 65_536
"""The most pairs of different boxes of one tensor that overlap. A grid of 10 x 10 x 10 ranks with halos has 10,000."""

MAX_CANDIDATES = 1 << 26
"""The most pairs of boxes of one tensor that are compared: a quarter of a second."""

MAX_PIECES = 64
"""The most pieces that a rank writes of one box. One that needs more is written whole, and its overlaps twice."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A region of a tensor that several ranks hold."""

    name: str
    box: Box
    """In the tensor's global coordinates; not empty. Each of the ranks holds all of it."""
    ranks: tuple[int, ...]
    """Ascending, at least two. The first one writes the region, unless a lower rank holds some or all of it: that is
    another overlap then."""


def overlaps(boxes: Mapping[str, Mapping[int, Box]]) -> tuple[Overlap, ...]:
    """Returns the regions that must be equal so that each tensor has one value: for any two ranks, all that both hold.

    `boxes` maps each name to the box that each rank holds; none is empty. The result is sorted by name and box, so all
    callers with the same boxes get the same order.

    Raises UnsupportedState, naming the tensor, if more than MAX_PAIRS pairs of different boxes overlap.
    """
    found: list[Overlap] = []
    known: dict[tuple[tuple[int, Box], ...], list[tuple[Box, tuple[int, ...]]]] = {}
    for name, by_rank in sorted(boxes.items()):
        cut = tuple(sorted(by_rank.items(), key=lambda item: item[0]))
        if cut not in known:  # tensors are cut alike
            known[cut] = _regions(name, cut)
        found += (Overlap(name, box, ranks) for box, ranks in known[cut])
    return tuple(found)


def _regions(name: str, cut: Sequence[tuple[int, Box]]) -> list[tuple[Box, tuple[int, ...]]]:
    holders: dict[Box, set[int]] = {}
    for rank, box in cut:
        holders.setdefault(box, set()).add(rank)
    regions = {box: {*ranks} for box, ranks in holders.items() if len(ranks) > 1}
    distinct = [*holders]
    try:
        pairs = overlapping(distinct)
    except UnsupportedState as error:
        raise UnsupportedState(f"{name}: {error}. Give each rank the box that is its own") from None
    for i, j, common in pairs:
        regions.setdefault(common, set()).update(holders[distinct[i]], holders[distinct[j]])
    return sorted(
        ((box, tuple(sorted(ranks))) for box, ranks in regions.items()), key=lambda r: (r[0].offset, r[0].shape)
    )


Meeting = tuple[int, int, Box]
"""Positions of two boxes, ascending, and the region that both hold."""


def meetings(boxes: Sequence[Box]) -> list[Meeting]:
    """Returns the regions that must be equal so that a tensor saved as these boxes has one value, sorted.

    Of equal boxes, each is to be compared with the first. Raises UnsupportedState as `overlapping` does.
    """
    first: dict[Box, int] = {}
    twice = [(at, i, box) for i, box in enumerate(boxes) if (at := first.setdefault(box, i)) != i and box.numel]
    position = [*first.values()]
    found = [(position[i], position[j], common) for i, j, common in overlapping([*first])]
    return sorted(twice + found, key=lambda meeting: meeting[:2])


def overlapping(boxes: Sequence[Box]) -> list[Meeting]:
    """Returns the pairs of boxes with a common region. No two of `boxes` may be equal.

    Sweeps along the dim in which the fewest boxes meet: n log n for boxes that tile a tensor. Raises UnsupportedState
    for more than MAX_PAIRS pairs, and if more than MAX_CANDIDATES would have to be compared.
    """
    if len(boxes) < 2:
        return []
    starts = np.array([box.offset for box in boxes], dtype=np.int64)
    stops = starts + np.array([box.shape for box in boxes], dtype=np.int64)
    num, order, last = min(
        (_meetings(starts[:, dim], stops[:, dim]) for dim in range(boxes[0].ndim)), key=lambda found: found[0]
    )
    if num > MAX_CANDIDATES:
        raise _too_many(len(boxes))
    starts, stops = starts[order], stops[order]
    pairs: list[tuple[int, int]] = []
    for i in np.flatnonzero(last > np.arange(1, len(boxes) + 1)):
        rest = slice(i + 1, last[i])
        low, high = np.maximum(starts[rest], starts[i]), np.minimum(stops[rest], stops[i])
        meet = order[np.flatnonzero((low < high).all(axis=1)) + i + 1]
        pairs += zip(np.minimum(meet, order[i]).tolist(), np.maximum(meet, order[i]).tolist(), strict=True)
        if len(pairs) > MAX_PAIRS:
            raise _too_many(len(boxes))
    return [(i, j, common) for i, j in sorted(pairs) if (common := boxes[i].intersect(boxes[j])) is not None]


def _meetings(starts: np.ndarray, stops: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """Returns how many pairs of intervals meet, their order by start, and in that order each last + 1 that it meets."""
    order = np.argsort(starts, kind="stable")
    last = np.searchsorted(starts[order], stops[order], side="left")
    last = np.maximum(last, np.arange(1, len(order) + 1))  # an empty interval meets none
    return int((last - np.arange(1, len(order) + 1)).sum()), order, last


def _too_many(num: int) -> UnsupportedState:
    return UnsupportedState(
        f"its {num:,} boxes overlap in more ways than can be compared; expected at most {MAX_PAIRS:,} pairs, of boxes "
        "that meet their neighbours only"
    )


def remainder(box: Box, covered: Iterable[Box]) -> tuple[Box, ...]:
    """Returns a box without the regions that others write, as at most MAX_PIECES disjoint boxes.

    Returns the box itself if there would be more: writing equal data twice does no harm.
    """
    left = [box]
    for other in sorted(covered, key=lambda region: -region.numel):  # the largest first: it leaves the fewest pieces
        left = [piece for one in left for piece in _without(one, other)]
        if len(left) > MAX_PIECES:
            return (box,)
    return tuple(sorted(left, key=lambda piece: piece.offset))


def _without(box: Box, other: Box) -> list[Box]:
    """Returns a box without another one, as up to two slabs for each dim."""
    common = box.intersect(other)
    if common is None:
        return [box]
    found: list[Box] = []
    offset, shape = list(box.offset), list(box.shape)
    for dim, (a, n) in enumerate(zip(common.offset, common.shape, strict=True)):
        stop = offset[dim] + shape[dim]
        for low, high in ((offset[dim], a), (a + n, stop)):
            if low < high:
                found.append(
                    Box((*offset[:dim], low, *offset[dim + 1 :]), (*shape[:dim], high - low, *shape[dim + 1 :]))
                )
        offset[dim], shape[dim] = a, n
    return found
