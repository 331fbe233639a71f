"""Ranges of a body: what a holder lacks of a snapshot. Pure integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ckptlib.slots.header import SlotHeader


class ByteRange(NamedTuple):
    """[start, end) of a body."""

    start: int
    end: int


Ranges = Sequence[ByteRange]
"""Ranges in ascending order that do not overlap."""

MAX_RANGES = 100
"""Most ranges that are told as lacking, since these fit on one page; if there are more, the closest are joined."""


def everything(header: SlotHeader) -> Ranges:
    """Returns the ranges of a body of which nothing is there."""
    return [ByteRange(0, header.body_nbytes)] if header.body_nbytes else []


def joined(ranges: Ranges) -> Ranges:
    """Returns at most MAX_RANGES ranges that cover these."""
    left = list(ranges)
    while len(left) > MAX_RANGES:
        gaps = sorted(later.start - earlier.end for earlier, later in pairwise(left))
        widest = gaps[len(left) - MAX_RANGES - 1]
        merged = left[:1]
        for later in left[1:]:
            if later.start - merged[-1].end <= widest:
                merged[-1] = ByteRange(merged[-1].start, later.end)
            else:
                merged.append(later)
        left = merged
    return left


def without(ranges: Ranges, holes: Iterable[ByteRange]) -> Ranges:
    """Returns the ranges without the holes. Holes do not overlap; their order does not matter."""
    left, cut = list[ByteRange](), sorted(holes, reverse=True)
    for start, end in ranges:
        at = start
        while cut and cut[-1].start < end:
            hole = cut[-1]
            if at < hole.start:
                left.append(ByteRange(at, hole.start))
            at = max(at, hole.end)
            if hole.end > end:
                break  # the rest of it may lie in the next range
            cut.pop()
        if at < end:
            left.append(ByteRange(at, end))
    return left
