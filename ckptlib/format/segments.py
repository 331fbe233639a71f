"""Parts of a dim: lists of ranges of indices, and the chunks that torch.chunk cuts a range into. Pure integers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeAlias

Segments: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open (start, stop) ranges of a dim's indices that a coordinate holds, none empty, in local order."""


def length_of(segments: Segments) -> int:
    return sum(stop - start for start, stop in segments)


def take(segments: Segments, first: int, last: int) -> Iterable[tuple[int, int]]:
    """Yields elements [first, last) of the list of indices that `segments` stand for, as segments."""
    position = 0
    for start, stop in segments:
        low, high = max(first - position, 0) + start, min(last - position + start, stop)
        if low < high:
            yield low, high
        position += stop - start


def joined(segments: Iterable[tuple[int, int]]) -> Segments:
    """Returns the same elements in the fewest segments."""
    found: list[tuple[int, int]] = []
    for start, stop in segments:
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, stop))
    return tuple(found)


def with_local_start(segments: Segments) -> list[tuple[int, int, int]]:
    """Returns (start, stop, start in the local tensor) of each segment."""
    ends = itertools.accumulate((stop - start for start, stop in segments), initial=0)
    return [(start, stop, local) for (start, stop), local in zip(segments, ends, strict=False)]


def chunk_at(length: int, num: int, index: int) -> tuple[int, int]:
    """Returns first and last + 1 element of chunk `index` of `num`, as torch.chunk cuts, with empty ones at the end."""
    each = -(-length // num)
    return min(index * each, length), min((index + 1) * each, length)


def chunks_touching(length: int, num: int, start: int, stop: int) -> Iterable[tuple[int, int, int]]:
    """Yields (index, first, last + 1) of each of `num` chunks that has an element of [start, stop)."""
    start, stop = max(start, 0), min(stop, length)
    if start < stop:
        each = -(-length // num)
        for i in range(start // each, (stop - 1) // each + 1):
            yield i, *chunk_at(length, num, i)


def num_chunks(length: int, num: int) -> int:
    """Returns how many of `num` chunks are not empty."""
    each = -(-length // num)
    return -(-length // each)
