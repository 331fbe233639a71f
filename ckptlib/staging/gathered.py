"""Gathers shards in memory of their device, run by run as they lie in the body: one copy over the link per run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from ckptlib.staging.pair import Pair
from ckptlib.staging.prepared_copies import Places

ALIGN = 16
"""A stretch has the same offset modulo this in the memory as in the body: torch views bytes as numbers of 16 bytes only
if they are aligned so."""


class Stretch(NamedTuple):
    """The bytes [start, stop) of a body."""

    start: int
    stop: int


def stretches_of(
    groups: Sequence[Iterable[Pair]], pairs: Iterable[Pair], beside: Iterable[int] = ()
) -> list[list[Stretch]]:
    """Returns, for each group, the fewest stretches with all of its shards, in order, and without any other shard of
    the body: of `pairs`, and those that begin at `beside`."""
    group_of = {id(pair): n for n, group in enumerate(groups) for pair in group}
    found = [list[Stretch]() for _ in groups]
    before = -1
    shards = [(pair.offset, pair.offset + pair.nbytes, group_of.get(id(pair), -1)) for pair in pairs]
    for start, stop, n in sorted([*shards, *((start, start, -1) for start in beside)]):
        if n >= 0 and n == before:
            found[n][-1] = Stretch(found[n][-1].start, stop)
        elif n >= 0:
            found[n].append(Stretch(start, stop))
        before = n
    return found


def nbytes_of(stretches: Sequence[Stretch]) -> int:
    """Returns the bytes of memory in which the stretches lie side by side."""
    return _side_by_side(stretches)[1]


def _side_by_side(stretches: Iterable[Stretch]) -> tuple[list[int], int]:
    """Returns where each stretch begins in such memory, and where the last one ends."""
    begins, end = list[int](), 0
    for start, stop in stretches:
        begins.append(end + (start - end) % ALIGN)
        end = begins[-1] + stop - start
    return begins, end


class Gathered:
    """The places of one group's shards in memory of their device, and of that memory in the body."""

    def __init__(self, stretches: Sequence[Stretch], memory: torch.Tensor, like_body: bool = False) -> None:
        """`like_body`: whether the memory has a place for every byte of the body; else stretches lie side by side."""
        self._stretches, self.memory = stretches, memory
        self._begins = [start for start, _ in stretches] if like_body else _side_by_side(stretches)[0]
        """Where each stretch begins in the memory."""

    def places(self, some: Sequence[Pair]) -> Places:
        """Returns shards of the group, and their places in the memory."""
        return Places(
            [pair.source.tensor for pair in some], [pair.place_in(self.memory, self._shift(pair)) for pair in some]
        )

    def _shift(self, pair: Pair) -> int:
        """Returns how many bytes nearer to the beginning a shard lies in the memory than in the body."""
        n = bisect_right(self._stretches, (pair.offset, 1 << 62)) - 1
        return self._stretches[n].start - self._begins[n]

    def runs(self, body: torch.Tensor) -> Places:
        """Returns the copies of the stretches, from the memory to the body."""
        some = list(zip(self._begins, self._stretches, strict=True))
        return Places(
            [self.memory[at : at + stop - start] for at, (start, stop) in some],
            [body[start:stop] for _, (start, stop) in some],
        )
