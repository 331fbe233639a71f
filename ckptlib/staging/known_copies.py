"""Keeps facts about the shards that go to each slot from one snapshot to the next.

A snapshot in a slot that was used before looks nothing up again for tensors that are still the same. But these facts
keep no memory alive: neither copies that a `state_dict()` made for one snapshot, nor the memory that a parameter had
before. Otherwise each slot would keep a copy of it, in the device's memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ckptlib.slots.slot import Slot
from ckptlib.staging.copies import Pairs
from ckptlib.staging.pair import CopySource, Pair


@dataclass(slots=True)
class _Known:
    """What is known of the copies into one slot."""

    body: torch.Tensor
    offsets: tuple[int, ...]
    """The offsets of all shards; compared by identity."""
    places: tuple[int, ...]
    """The offsets of the shards that are kept."""
    pairs: list[Pair | None]
    """The pairs; None if nobody has the source any more."""
    made: Pairs | None
    """All of them, sorted."""


class _Destination(NamedTuple):
    """Where a snapshot goes."""

    rank: int
    """The rank whose snapshot it is."""
    slot: str
    """The slot's path."""


class KnownPairs:
    """Finds source and target of each copy, or reuses those of the last snapshot. One per rank; main thread."""

    def __init__(self) -> None:
        self._known: dict[_Destination, _Known] = {}
        self._sources: dict[int, Sequence[CopySource]] = {}
        """The sources of each rank's last snapshot, except lent ones, by rank."""

    def pairs_of(self, rank: int, slot: Slot, sources: Sequence[CopySource], offsets: tuple[int, ...]) -> list[Pairs]:
        """Returns the shards of a rank and their places in a slot. `offsets`: the same object as long as the layout is
        the same.

        Looks nothing up if `sources` is the same object as for the rank's last snapshot.
        """
        known = self._known.get(_Destination(rank, str(slot.path)))
        if known is not None and known.made is not None and known.offsets is offsets and self._sources[rank] is sources:
            return [known.made]
        lent = [(source, offset) for source, offset in zip(sources, offsets, strict=True) if source.lent]
        if not lent:
            return [self._kept(rank, slot, sources, offsets, offsets)]
        kept = [(source, offset) for source, offset in zip(sources, offsets, strict=True) if not source.lent]
        found, body = list[Pairs](), _tensor_of(slot.body)
        if kept:
            found = [self._kept(rank, slot, [s for s, _ in kept], tuple([o for _, o in kept]), offsets, _begins(lent))]
        return [*found, Pairs([Pair(source, body, offset) for source, offset in lent], _begins(kept))]

    def _kept(
        self,
        rank: int,
        slot: Slot,
        sources: Sequence[CopySource],
        places: tuple[int, ...],
        offsets: tuple[int, ...],
        beside: Sequence[int] = (),
    ) -> Pairs:
        self._forget(rank, sources)
        key = _Destination(rank, str(slot.path))
        known = self._known.get(key)
        if known is None or known.offsets is not offsets or known.places != places:
            self._known = {k: v for k, v in self._known.items() if k.rank != rank or v.offsets is offsets}
            body = _tensor_of(slot.body)
            known = self._known[key] = _Known(body, offsets, places, [None] * len(sources), None)
        if known.made is not None and all(p.source is s for p, s in zip(known.made.all, sources, strict=True)):
            return known.made
        pairs = [
            pair if pair is not None and pair.source is source else Pair(source, known.body, place)
            for pair, source, place in zip(known.pairs, sources, places, strict=True)
        ]
        known.pairs, known.made = list(pairs), Pairs(pairs, beside)
        return known.made

    def _forget(self, rank: int, sources: Sequence[CopySource]) -> None:
        """Forgets, in all slots of a rank, shards that have another source now."""
        before = self._sources.get(rank, [])
        self._sources[rank] = sources
        if len(before) != len(sources):
            self._known = {key: known for key, known in self._known.items() if key.rank != rank}
            return
        changed = [i for i, same in enumerate(map(operator.is_, before, sources)) if not same]
        if changed:
            for known in (known for key, known in self._known.items() if key.rank == rank):
                known.made = None
                for i in changed:
                    known.pairs[i] = None

    def clear(self) -> None:
        self._known.clear()
        self._sources.clear()


def _begins(shards: Iterable[tuple[CopySource, int]]) -> list[int]:
    return [offset for source, offset in shards if source.tensor.nbytes]


def _tensor_of(body: memoryview) -> torch.Tensor:
    """Returns the body as a tensor. It is empty if a step has values only, or tensors without elements: torch makes no
    tensor of an empty buffer."""
    return torch.frombuffer(body, dtype=torch.uint8) if body.nbytes else torch.empty(0, dtype=torch.uint8)
