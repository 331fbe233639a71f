"""Proves that a save is whole: that its parts hold every element of every tensor, and one value for each.

A load needs no more than that, so a step with this proof loads. Pure: no torch, no I/O. This module finds overlaps of
two parts, by their tables; `ckptlib.catalog.shards` compares the bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from ckptlib.errors import FormatError, UnsupportedState
from ckptlib.format import sharding
from ckptlib.format.box import Box, Effort, find_hole
from ckptlib.format.layout import Layout, OwnPerRank, Placed, TensorEntry
from ckptlib.format.overlaps import Meeting, meetings
from ckptlib.format.part import Part

MAX_DOUBTS = 2**14
"""The most overlaps of a save, which take half a second. Ranks that compared their replicas write no element twice,
except in boxes whose overlaps would cut them into very many pieces."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """The overlap of two shards; the tensor has a value only if they are equal there."""

    name: str
    region: Box
    ranks: tuple[int, int]
    """The ranks whose parts hold the shards, ascending."""
    boxes: tuple[Box, Box]
    """The boxes of the shards."""


class Proof:
    """The content of a set of parts. Parts are not kept after they are added: those of a thousand ranks are
    gigabytes."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        """Tensors by name."""
        self._rows: dict[str, list[_Held | None]] = {}
        """By layout: each of its tensors; None if every rank has its own, or ranks differ on its shape or dtype."""
        self._runs: dict[tuple[str, tuple[int, ...]], _Alike] = {}
        """Parts that were not added to `_held` yet, by layout and the tensors of their shards."""
        self._kinds: dict[str, int] = {}
        """A number for each tensor, by name, equal for tensors that are cut alike; filled when first needed."""
        self._lost: str | None = None
        self._clash: str | None = None

    def add(self, part: Part, layout: Layout) -> None:
        """Adds a part that was checked against its layout. Parts must be added in the order of their ranks."""
        table, rank = part.table, part.rank
        if table.layout not in self._rows:
            self._rows[table.layout] = [self._row(entry, rank) for entry in layout.tensors]
        run = self._runs.get((table.layout, table.tensors))
        if run is None:
            own = {*table.tensors}
            lost = next((i for i in layout.per_rank if i not in own), None)
            run = self._runs[table.layout, table.tensors] = _Alike(lost)
        run.ranks.append(rank)
        run.boxes.append(table.boxes)
        if run.lost is not None and self._lost is None:
            self._lost = f"{layout.tensors[run.lost].name} of rank {rank}"

    def _tell(self) -> None:
        """Adds the shards of the parts to their tensors, column by column, since there may be millions."""
        told: Counter[str] = Counter()
        for (layout, tensors), run in self._runs.items():
            columns: dict[int, list[tuple[Box, ...]]] = {}
            for tensor, boxes in zip(tensors, zip(*run.boxes, strict=True), strict=True):
                columns.setdefault(tensor, []).append(boxes)
            ranks = {num: [rank for rank in run.ranks for _ in range(num)] for num in {*map(len, columns.values())}}
            for tensor, shards in columns.items():
                held = self._rows[layout][tensor]
                if held is not None:
                    held.boxes.extend(shards[0] if len(shards) == 1 else chain.from_iterable(zip(*shards, strict=True)))
                    held.ranks.extend(ranks[len(shards)])
                    told[held.entry.name] += 1
        for name in (name for name, runs in told.items() if runs > 1):
            self._held[name].sort()
        if self._runs:
            self._runs, self._kinds = {}, {}

    def _kind(self, name: str) -> int:
        self._tell()
        if not self._kinds:
            numbers: dict[object, int] = {}
            self._kinds = {name: numbers.setdefault(held.kind, len(numbers)) for name, held in self._held.items()}
        return self._kinds[name]

    def _row(self, entry: TensorEntry, rank: int) -> _Held | None:
        if isinstance(entry.holding, OwnPerRank):
            return None
        held = self._held.get(entry.name)
        if held is None:
            held = self._held[entry.name] = _Held(entry, rank)
        kinds = [f"{e.dtype}{list(e.shape)}" for e in (held.entry, entry)]
        if kinds[0] != kinds[1]:
            self._clash = (
                self._clash or f"{entry.name} is {kinds[0]} on rank {held.first} and {kinds[1]} on rank {rank}"
            )
            return None
        return held

    def missing(self) -> str | None:
        """Returns a region that no part holds, as "name[box]", or None if every tensor of the layouts is whole.

        Raises FormatError if that cannot be told, UnsupportedState for placements that torch reads in two ways.
        """
        if self._lost is not None:
            return self._lost
        whole: set[int] = set()
        effort = Effort()
        for name, held in self._held.items():
            kind = self._kind(name)
            if kind not in whole:
                try:
                    hole = _hole(held.entry, held.boxes, effort)
                except FormatError as error:
                    raise FormatError(f"{name}: {error}") from None
                except UnsupportedState as error:
                    raise UnsupportedState(f"{name}: {error}") from None
                if hole is not None:
                    return f"{held.entry.name}{hole}"
                whole.add(kind)
        return None

    def clash(self) -> str | None:
        """Returns a tensor whose dtype or shape differs between ranks, with those of two of them; None if none does."""
        return self._clash

    def doubts(self) -> list[Doubt]:
        """Returns all overlaps of shards, in the order of the ranks. There is none if every element is written once, as
        in every save for which the ranks compared their replicas.

        Raises UnsupportedState if there are more than can be compared.
        """
        found: list[Doubt] = []
        known: dict[int, list[Meeting]] = {}
        for name, held in self._held.items():
            kind = self._kind(name)
            if len(held.boxes) < 2:
                continue
            if kind not in known:
                known[kind] = _meetings(held.entry, held.boxes)
            if len(found) + len(known[kind]) > MAX_DOUBTS:
                raise UnsupportedState(
                    f"{name}: ranks wrote more than {MAX_DOUBTS:,} regions twice, in this tensor and those before it; "
                    "that is more than can be compared. Give each rank the box that is its own"
                )
            for i, j, region in known[kind]:
                found.append(Doubt(name, region, (held.ranks[i], held.ranks[j]), (held.boxes[i], held.boxes[j])))
        return sorted(found, key=lambda doubt: doubt.ranks)


@dataclass(frozen=True, slots=True)
class _Alike:
    """Parts with shards of the same tensors, as most ranks have."""

    lost: int | None
    """A tensor of which each rank should have its own, but these parts lack it."""
    ranks: list[int] = field(default_factory=list)
    boxes: list[tuple[Box, ...]] = field(default_factory=list)
    """For each part, the boxes of its shards."""


class _Held:
    """The shards of one tensor."""

    __slots__ = ("boxes", "entry", "first", "ranks")

    def __init__(self, entry: TensorEntry, first: int) -> None:
        self.entry = entry
        self.first = first
        """The first rank whose layout has it."""
        self.boxes: list[Box] = []
        self.ranks: list[int] = []
        """For each box, the rank whose part holds it."""

    def sort(self) -> None:
        """Sorts boxes and ranks by rank; boxes of one rank stay in their order."""
        order = sorted(range(len(self.ranks)), key=self.ranks.__getitem__)
        self.boxes = [*map(self.boxes.__getitem__, order)]
        self.ranks = [*map(self.ranks.__getitem__, order)]

    @property
    def kind(self) -> object:
        """A key that is equal for tensors that are cut alike: equal boxes of a table are one object."""
        return self.entry.shape, self.entry.holding, *map(id, self.boxes)


def _hole(entry: TensorEntry, boxes: Sequence[Box], effort: Effort) -> Box | None:
    distinct = set(boxes)
    tiling = _tiling(entry, len(distinct))
    if tiling is not None and tiling <= distinct:
        return None  # there may be thousands of boxes, and the general way takes quadratic time
    return find_hole(Box.whole(entry.shape), list(distinct), effort)


def _meetings(entry: TensorEntry, boxes: Sequence[Box]) -> list[Meeting]:
    tiling = _tiling(entry, len(boxes))
    if tiling is not None and len(tiling) == len(boxes) and tiling == {*boxes}:
        return []
    try:
        return meetings(boxes)
    except UnsupportedState as error:
        raise UnsupportedState(f"{entry.name}: {error}") from None


def _tiling(entry: TensorEntry, num: int) -> frozenset[Box] | None:
    """Returns every box of a tensor on a mesh: together they are the whole, and none overlap.

    Returns None if it is not on a mesh, or is cut into more than `num` boxes. Listing those of a mesh of thousands of
    ranks is worth it only if a part of each was read, and a layout of one megabyte may have thousands of shapes.
    """
    holding = entry.holding
    if not isinstance(holding, Placed):
        return None
    if sharding.least_pieces(entry.shape, holding.mesh.shape, holding.placements) > num:
        return None
    return _placed_boxes(entry.shape, holding.mesh.shape, holding.placements)


@lru_cache(maxsize=64)  # layers are alike
def _placed_boxes(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[sharding.Placement, ...]
) -> frozenset[Box]:
    holders = sharding.coordinates_touching(shape, mesh_shape, placements, Box.whole(shape))
    return frozenset(piece.box for at in holders for piece in sharding.pieces(shape, mesh_shape, placements, at))
