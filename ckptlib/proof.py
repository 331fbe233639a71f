"""The proof that a save is whole: whether its parts hold every element of every tensor. Pure: no torch, no I/O."""

from __future__ import annotations

from functools import lru_cache

from ckptlib import sharding
from ckptlib.box import Box, find_hole
from ckptlib.layout import Layout, PerRank, Placed, TensorEntry
from ckptlib.part import Part


class Proof:
    """What a set of parts holds. Each is looked at once and not kept: those of a thousand ranks are gigabytes."""

    def __init__(self) -> None:
        self._boxes: dict[str, list[Box]] = {}
        """By name: what was written of a tensor."""
        self._wanted: dict[str, TensorEntry] = {}
        self._rows: dict[str, list[list[Box]]] = {}
        """By layout: of each of its tensors the list in `_boxes`."""
        self._lost: str | None = None

    def add(self, part: Part, layout: Layout) -> None:
        """A part that was checked against its layout."""
        table = part.table
        rows = self._rows.get(table.layout)
        if rows is None:
            rows = self._rows[table.layout] = [self._boxes.setdefault(entry.name, []) for entry in layout.tensors]
            for entry in layout.tensors:
                if not isinstance(entry.holding, PerRank):
                    self._wanted.setdefault(entry.name, entry)
        for tensor, box in zip(table.tensors, table.boxes, strict=True):
            rows[tensor].append(box)
        own = {*table.tensors}
        lost = next((i for i in layout.per_rank if i not in own), None)
        if lost is not None and self._lost is None:
            self._lost = f"{layout.tensors[lost].name} of rank {part.rank}"

    def missing(self) -> str | None:
        """What no part holds, as "name[box]", or None when every tensor of their layouts is whole."""
        if self._lost is not None:
            return self._lost
        whole: set[tuple[object, ...]] = set()
        for name, entry in self._wanted.items():
            boxes = self._boxes[name]
            # equal boxes of a table are one object, so tensors that are cut alike have the same ones
            kind = entry.shape, entry.holding, *map(id, boxes)
            if kind not in whole:
                hole = _hole(entry, boxes)
                if hole is not None:
                    return f"{name}{hole}"
                whole.add(kind)
        return None


def _hole(entry: TensorEntry, boxes: list[Box]) -> Box | None:
    distinct, holding = set(boxes), entry.holding
    if isinstance(holding, Placed) and _placed_boxes(entry.shape, holding.mesh.shape, holding.placements) <= distinct:
        return None  # thousands of boxes, and the general way takes the square of that
    return find_hole(Box.whole(entry.shape), list(distinct))


@lru_cache(maxsize=64)  # layers are alike
def _placed_boxes(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[sharding.Placement, ...]
) -> frozenset[Box]:
    """Every box of a tensor on a mesh; together they are the whole."""
    holders = sharding.coordinates_touching(shape, mesh_shape, placements, Box.whole(shape))
    return frozenset(piece.box for at in holders for piece in sharding.pieces(shape, mesh_shape, placements, at))
