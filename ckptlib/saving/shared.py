"""Replicated boxes of tensors, which one rank writes for all, and the proof that all ranks hold the same.

A box is replicated if a DTensor says so, if ranks agreed so on a plain tensor, or if boxes cut by hand overlap.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ckptlib.errors import ReplicasDiffer
from ckptlib.format.box import Box
from ckptlib.format.check import add_up, check_of
from ckptlib.format.layout import Placed
from ckptlib.ranks.group import Group
from ckptlib.saving.agreement import DIVERGED, Agreement, within
from ckptlib.saving.assign import holders_of
from ckptlib.staging.tensor_digests import digests_of
from ckptlib.state.leaf import Leaf


@dataclass(frozen=True, slots=True)
class Shared:
    """One box that this rank and others hold."""

    ranks: tuple[int, ...]
    """All ranks that hold it, ascending."""
    leaf: int
    piece: int
    region: Box
    """The box in the tensor's global coordinates: the piece, or its overlap with those of others."""

    def tensor(self, leaves: Sequence[Leaf]) -> torch.Tensor:
        """Returns this rank's data, as a detached view of the region's shape."""
        box, tensor = leaves[self.leaf].pieces[self.piece]
        return tensor.detach() if box == self.region else within(self.region, box, tensor)


def shared_of(leaves: Sequence[Leaf], agreement: Agreement, rank: int) -> tuple[Shared, ...]:
    """Returns the boxes that this rank shares, in the same order on all ranks that hold them. Those of the same ranks
    follow each other."""
    ranks: dict[int, tuple[int, ...]] = {}
    found: list[tuple[tuple[int, ...], str, Shared]] = []
    for i, leaf in enumerate(leaves):
        holding = agreement.holdings.get(leaf.name)
        if not isinstance(holding, Placed):
            continue
        holders = agreement.holders.get(leaf.name)
        if holders is None:
            if id(holding) not in ranks:  # thousands of plain tensors share few holdings
                ranks[id(holding)] = holders_of(holding, rank)
            those = ranks[id(holding)]
        else:
            those = holders_of(holding, rank, holders)
        if len(those) > 1:
            pieces = enumerate(leaf.pieces)
            found += ((those, leaf.name, Shared(those, i, piece, box)) for piece, (box, _) in pieces)
    by_name = {leaf.name: i for i, leaf in enumerate(leaves)} if agreement.overlaps else {}
    for overlap in agreement.overlaps:
        found.append((overlap.ranks, overlap.name, Shared(overlap.ranks, by_name[overlap.name], 0, overlap.box)))
    return tuple(s for _, _, s in sorted(found, key=lambda f: (f[0], f[1], f[2].region.offset, f[2].region.shape)))


def prove(leaves: Sequence[Leaf], shared: Sequence[Shared], group: Group) -> None:
    """Compares in full the boxes of DTensors that several ranks hold. Collective; one small sum if all are alike.

    Other replicas were compared when the ranks agreed on them. Raises ReplicasDiffer, which names the tensors, on all
    ranks.
    """
    if group.size == 1:
        return
    those = [s for s in shared if isinstance(leaves[s.leaf].held, Placed)]
    digests = digests_of([s.tensor(leaves) for s in those])
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for s, digest in zip(those, digests, strict=True):
        by_ranks.setdefault(s.ranks, []).append(digest)
    check = check_of(0, group.rank, {ranks: "".join(some).encode() for ranks, some in by_ranks.items()})
    if add_up(*group.start_sum([check.low, check.high])()):
        return
    own = [[leaves[s.leaf].name, s.region.offset, s.ranks, digest] for s, digest in zip(those, digests, strict=True)]
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, data in enumerate(group.gather(zlib.compress(json.dumps(own).encode(), 1))):
        for name, offset, ranks, digest in json.loads(zlib.decompress(data)):
            there = first.setdefault(json.dumps([name, offset, ranks]), (rank, digest))
            if there[1] != digest:
                differing.setdefault(name, (there[0], rank))
    some = "; ".join(f"{name} on ranks {a} and {b}" for name, (a, b) in sorted(differing.items())[:8])
    raise ReplicasDiffer(
        f"{len(differing)} DTensor(s) that are replicas by their mesh differ between ranks: {some}; {DIVERGED}"
    )
