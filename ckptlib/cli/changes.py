"""Finds the differences between two steps, tensor by tensor and value by value, from their documents and a function
that reads packs. No torch.

Chunks of equal digest are equal without being read. Chunks that differ count whole, unless elements are asked for.
If the steps cut a tensor differently, the digests of one say nothing about the other, and the bytes are read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ckptlib.catalog.shards import PartIndex, SavedShard, ShardComparer
from ckptlib.format.box import Box
from ckptlib.format.layout import OwnPerRank
from ckptlib.format.part import Part
from ckptlib.format.paths import join
from ckptlib.format.tagged_values import NEST
from ckptlib.format.values import Json

PIECE_BYTES = 4 * 1024 * 1024
"""How many bytes of two shards are compared at once."""


@dataclass(slots=True)
class Changed:
    """How much of one tensor differs between two steps."""

    nbytes: int = 0
    """Bytes of the elements that differ; of whole chunks that differ if elements were not compared."""
    elements: int = 0
    """The number of elements that differ; 0 if they were not compared."""

    def add(self, nbytes: int, elements: int) -> None:
        self.nbytes += nbytes
        self.elements += elements


class ShardDiffer(ShardComparer):
    """Counts differences between shards; owned by one thread."""

    def count(self, first: SavedShard, second: SavedShard, region: Box, deep: bool, into: Changed) -> None:
        """Adds the differences in a region to `into`. The region lies in the boxes of both shards, whose tensors have
        one dtype. Raises as `same` does."""
        comparable = first.part.algorithm == second.part.algorithm
        if comparable and first.box == second.box == region:
            if first.digests == second.digests and first.skipped == second.skipped:
                return
            if not (first.is_shared or second.is_shared) and first.cuts == second.cuts:
                self._count_chunks(first, second, deep, into)
                return
        for piece in region.split(max(PIECE_BYTES // first.itemsize, 1)):
            _count(self._bytes(first, piece), self._bytes(second, piece), into)

    def _count_chunks(self, first: SavedShard, second: SavedShard, deep: bool, into: Changed) -> None:
        chunks = zip(first.part.table.chunks(first.shard), second.part.table.chunks(second.shard), strict=True)
        for one, other in chunks:
            if first.part.digests[one] == second.part.digests[other]:
                continue
            if not deep:
                into.add(first.part.table.nbytes[one], 0)
                continue
            _count(self._rows(first, one), self._rows(second, other), into)

    def _rows(self, saved: SavedShard, chunk: int) -> np.ndarray:
        """Returns the elements of a chunk that no other shard shares, as rows of bytes."""
        return np.frombuffer(self._chunk(saved.part, chunk, saved.layout), np.uint8).reshape(-1, saved.itemsize)


def _count(one: np.ndarray, other: np.ndarray, into: Changed) -> None:
    """Adds the elements that differ to `into`. Elements are rows of bytes."""
    elements = int(np.count_nonzero((one != other).any(axis=-1)))
    into.add(elements * one.shape[-1], elements)


def count_rank(differ: ShardDiffer, first: PartIndex, second: PartIndex, deep: bool) -> dict[str, Changed]:
    """Compares two parts that are cut alike, shard by shard. Returns what changed, by tensor."""
    found: dict[str, Changed] = {}
    for shard, tensor in enumerate(first.part.table.tensors):
        changed = Changed()
        one, other = first.shard(shard), second.shard(shard)
        differ.count(one, other, one.box, deep, changed)
        if changed.nbytes:
            name = first.layout.tensors[tensor].name
            found.setdefault(name, Changed()).add(changed.nbytes, changed.elements)
    return found


def count_tensor(
    differ: ShardDiffer, name: str, first: Mapping[int, PartIndex], second: Mapping[int, PartIndex], deep: bool
) -> Changed:
    """Compares one tensor that both steps have with the same dtype and shape, however they cut it. `first`, `second`:
    the parts by rank.

    A tensor of which each rank has its own is compared on the ranks that both steps have.
    """
    changed = Changed()
    ones, others = _shards(name, first.values()), _shards(name, second.values())
    if any(_is_own(saved, name) for saved in (*ones, *others)):
        for rank in first.keys() & second.keys():
            _count_all(differ, _shards(name, [first[rank]]), _shards(name, [second[rank]]), deep, changed)
    else:
        _count_all(differ, ones, others, deep, changed)
    return changed


def _is_own(saved: SavedShard, name: str) -> bool:
    return isinstance(saved.layout.tensors[saved.layout.index[name]].holding, OwnPerRank)


def _shards(name: str, parts: Iterable[PartIndex]) -> list[SavedShard]:
    return [part.shard(shard) for part in parts for shard in part.shards(name)]


def _count_all(
    differ: ShardDiffer, ones: list[SavedShard], others: list[SavedShard], deep: bool, into: Changed
) -> None:
    for i, j, region in _meetings(tuple(saved.box for saved in ones), tuple(saved.box for saved in others)):
        one, other = ones[i], others[j]
        if one.itemsize == other.itemsize:
            differ.count(one, other, region, deep, into)


@lru_cache(maxsize=256)  # layers are alike
def _meetings(ones: tuple[Box, ...], others: tuple[Box, ...]) -> tuple[tuple[int, int, Box], ...]:
    """Returns the regions that boxes of both have in common. If both have the same boxes, each is compared once.

    The boxes of each side have one number of dims.
    """
    if ones == others and len({*ones}) == len(ones):
        return tuple((i, i, box) for i, box in enumerate(ones))
    if not (ones and others) or ones[0].ndim != others[0].ndim:
        return ()
    starts = np.array([box.offset for box in others], np.int64)
    stops = starts + np.array([box.shape for box in others], np.int64)
    found = []
    for i, one in enumerate(ones):  # row by row: there may be a hundred million pairs
        low, high = np.maximum(starts, one.offset), np.minimum(stops, np.add(one.offset, one.shape))
        for j in np.flatnonzero((low < high).all(axis=1)).tolist():
            common = one.intersect(others[j])
            if common is not None:
                found.append((i, j, common))
    return tuple(found)


@dataclass(slots=True)
class ValueChange:
    """The change of one value, or of one entry of a dict."""

    rank: int
    """The lowest rank that has the change."""
    before: Json
    after: Json
    """The values on that rank; None where there is none."""
    kind: str
    """changed, added or removed."""
    num_ranks: int = 1
    """The number of ranks on which it changed, maybe in different ways."""


@dataclass(slots=True)
class ValueChanges:
    """Changes of values, by path. Entries of dicts have paths of their own, after a dot; those of containers of the
    state, after a slash, however they were saved."""

    found: dict[str, ValueChange] = field(default_factory=dict)

    def add(self, first: Part, second: Part) -> None:
        """Adds the differences between the values of one rank. Ranks must come in order."""
        before, after = dict(_leaves(first.values)), dict(_leaves(second.values))
        for path in sorted({*before, *after}):
            kind = "changed" if path in before and path in after else "added" if path in after else "removed"
            one, other = before.get(path), after.get(path)
            if kind == "changed" and json.dumps(one) == json.dumps(other):
                continue
            if path in self.found:
                self.found[path].num_ranks += 1
            else:
                self.found[path] = ValueChange(first.rank, one, other, kind)


def _leaves(values: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    for name, value in values.items():
        if isinstance(value, dict) and NEST in value:
            yield from _entries(value[NEST], f"{prefix}{name}")
        elif isinstance(value, dict) and value and not _is_tagged(value):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _entries(value: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Yields the entries of a container that was saved whole: those in lists, tuples and dicts with text keys."""
    items = value.get("$tuple", value) if isinstance(value, dict) else value
    if isinstance(items, list) and items:
        for i, item in enumerate(items):
            yield from _entries(item, join(path, i))
    elif isinstance(items, dict) and items and not _is_tagged(items):
        for key, item in items.items():
            yield from _entries(item, join(path, key))
    else:
        yield path, value


def _is_tagged(value: Mapping[str, Json]) -> bool:
    return any(key.startswith("$") for key in value)
