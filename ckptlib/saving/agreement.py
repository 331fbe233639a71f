"""Agreement on what every rank holds: which plain tensors are replicas, and which ranks really have a tensor.

A DTensor says itself which ranks hold the same box. A plain tensor is a replica if its bytes are the same on all ranks
that have the name. Either may turn out untrue later: each save proves it anew (see `replica_digests`).
"""

from __future__ import annotations

import itertools
import json
import logging
import operator
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import xxhash

from ckptlib.errors import ReplicasDiffer, UnsupportedState
from ckptlib.format import sharding
from ckptlib.format.box import Box
from ckptlib.format.layout import ByHand, Holding, Mesh, OwnPerRank, Placed
from ckptlib.format.overlaps import Overlap, overlaps, remainder
from ckptlib.ranks.group import Group
from ckptlib.staging.tensor_digests import digests_of
from ckptlib.state.leaf import Leaf, Plain

log = logging.getLogger(__name__)


class Row(NamedTuple):
    """One name of a rank's state, as the rank describes it to the others."""

    dtype: str
    shape: Sequence[int]
    """Global shape; empty for a per-rank value."""
    how: str
    """How it is held."""
    is_owned: bool
    """Whether an optimizer owns it."""
    is_frozen: bool
    """See `Leaf.frozen`."""
    digest: str
    """Digest of a plain tensor's values, or `OWN`."""
    box: tuple[Sequence[int], Sequence[int]] | None
    """Offset and shape of a tensor cut by hand, unless that is empty."""
    tied: str | None
    """See `Leaf.tied`."""


Said = Sequence[tuple[Row, tuple[int, ...]]]
"""The rows that ranks gave for one name, each with its ranks, ascending. Ranks with equal states share one row: there
may be thousands of ranks, with thousands of names."""

OWN = "own"
"""Stands in for a digest: this plain tensor has differed between ranks before, and each rank saves its own from then
on."""


DIVERGED = (
    "the ranks have diverged: gradients of what they replicate are not all-reduced over all of them (such as norms and "
    "biases within a tensor-parallel group), random numbers for it differ (dropout or a seed of each rank's own), or a "
    "host's memory is faulty. Mend that, and resume from the last committed step"
)
"""Advice for errors about replicas that differ."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks know of each other, for the names that this rank has."""

    holdings: Mapping[str, Holding]
    """How each tensor is held, for all names but aliases; writers are not chosen yet."""
    holders: Mapping[str, frozenset[int]]
    """The ranks that really have it, for names that not every rank of their mesh has."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied tensors, each with its first name. Only ties that all ranks with either name have."""
    written: Mapping[str, tuple[Box, ...]] = field(default_factory=dict)
    """For tensors cut by hand whose boxes overlap: the part of its box that this rank writes, if it does not write
    all."""
    overlaps: tuple[Overlap, ...] = ()
    """The shared boxes of tensors cut by hand that this rank holds; every holder has them in this order."""
    unevenly_owned: frozenset[str] = frozenset()
    """The tensors that an optimizer owns on some ranks only, as where each rank steps its own share of them, or that
    are frozen on some only."""


def rows_of(leaves: Sequence[Leaf], group: Group, own: Collection[str] = ()) -> dict[str, Row]:
    """Returns this rank's rows, by name. Reads plain tensors whole, for their digests. Not collective.

    `own`: plain tensors that have differed between ranks. Returns nothing in a group of one: there is no other rank to
    tell.
    """
    if group.size == 1:
        return {}
    plain = [leaf for leaf in leaves if isinstance(leaf.held, Plain) and leaf.tied is None and leaf.pieces]
    read = [leaf for leaf in plain if leaf.name not in own]
    digests = dict(zip((leaf.name for leaf in read), digests_of([leaf.pieces[0][1] for leaf in read]), strict=True))
    digests.update((leaf.name, OWN) for leaf in leaves if leaf.name in own)
    return {leaf.name: _row(leaf, group, digests.get(leaf.name, digests.get(leaf.tied or "", ""))) for leaf in leaves}


def agree(leaves: Sequence[Leaf], rows: Mapping[str, Row], group: Group) -> Agreement:
    """Compares what ranks hold. Collective; one small reduction if all hold the same.

    Raises UnsupportedState, on all ranks, for a name that stands for different tensors; ReplicasDiffer for a tensor
    that an optimizer owns and whose values differ between ranks.
    """
    if group.size == 1:  # no other rank to differ from: takes a tenth of the time, for thousands of small tensors
        tied = {leaf.name: leaf.tied for leaf in leaves if leaf.tied is not None}
        return Agreement({leaf.name: _holding_alone(leaf, group) for leaf in leaves if leaf.tied is None}, {}, tied)
    document = encode_rows(rows)
    if group.same(document):
        everybody = tuple(range(group.size))
        found: dict[str, Said] = {name: [(row, everybody)] for name, row in rows.items()}
    else:
        found = read_rows(group.gather(zlib.compress(document, 1)))
    aliases = _take_aliases(found, {leaf.name for leaf in leaves})
    leaves = [leaf for leaf in leaves if leaf.name not in aliases]
    joined = _join_meshes(leaves, found, group)
    for name, said in sorted(found.items()):
        if name not in joined:
            _check(name, said)
    holdings = {leaf.name: joined.get(leaf.name) or _holding(leaf, found[leaf.name], group) for leaf in leaves}
    holders = {}
    for name, holding in holdings.items():
        have = _ranks(found[name])
        if isinstance(holding, Placed) and have != holding.mesh.ranks and {*have} != {*holding.mesh.ranks}:
            holders[name] = frozenset(have)
    shared = _compare_overlaps(leaves, found, group)
    unevenly = {name for name in holdings if len({(row.is_owned, row.is_frozen) for row, _ in found[name]}) > 1}
    return Agreement(holdings, holders, aliases, _written(leaves, shared, group.rank), shared, frozenset(unevenly))


def encode_rows(rows: Mapping[str, Row]) -> bytes:
    """Encodes rows as JSON. Each `how` is written once: it lists all ranks of a mesh, and thousands of tensors may
    share it."""
    hows = sorted({row.how for row in rows.values()})
    number = {how: i for i, how in enumerate(hows)}
    told = {name: [row.dtype, row.shape, number[row.how], *row[3:]] for name, row in rows.items()}
    return json.dumps([hows, told], sort_keys=True).encode()


def read_rows(documents: Iterable[bytes]) -> dict[str, Said]:
    """Returns all ranks' rows, by name. `documents`: the encoded rows of each rank, compressed. Equal descriptions
    become one object."""
    givers: dict[bytes, list[int]] = {}
    for rank, document in enumerate(documents):
        givers.setdefault(document, []).append(rank)
    found: dict[str, list[tuple[Row, tuple[int, ...]]]] = {}
    texts: dict[str, str] = {}
    for document, those in givers.items():
        hows, rows = json.loads(zlib.decompress(document))
        hows, ranks = [texts.setdefault(how, how) for how in hows], tuple(those)
        for name, (dtype, shape, how, *rest) in rows.items():
            found.setdefault(name, []).append((Row(dtype, shape, hows[how], *rest), ranks))
    return {**found}


def _ranks(said: Said) -> tuple[int, ...]:
    """Returns all ranks that have the name, ascending."""
    return said[0][1] if len(said) == 1 else tuple(sorted(itertools.chain.from_iterable(ranks for _, ranks in said)))


def _take_aliases(found: dict[str, Said], own: Collection[str]) -> dict[str, str]:
    """Removes names that are tied to another name on all ranks that have either. Returns this rank's, each with that
    other name.

    A tensor that only some ranks tie is saved under each of its names: a layout with an alias would send those who read
    a rank's share of one name to the share of another.
    """
    ties = {name: {row.tied for row, _ in said} for name, said in found.items()}
    aliases = {
        name: tied
        for name, (tied, *others) in ties.items()
        if tied is not None and not others and _ranks(found[name]) == _ranks(found[tied])
    }
    for name in aliases:
        del found[name]
    return {name: tied for name, tied in aliases.items() if name in own}


def _compare_overlaps(leaves: Sequence[Leaf], found: Mapping[str, Said], group: Group) -> tuple[Overlap, ...]:
    """Checks that overlapping boxes hold equal values, and returns the overlaps that this rank holds. Collective if any
    rank has some. Raises UnsupportedState, on all ranks, if values differ."""
    boxes = {
        name: {
            rank: Box(tuple(row.box[0]), tuple(row.box[1]))
            for row, ranks in said
            if row.box is not None
            for rank in ranks
        }
        for name, said in found.items()
        if said[0][0].how == "by-hand"  # on all ranks: `_check` refuses anything else
    }
    shared = overlaps(boxes)
    if not shared:
        return ()
    pieces = {leaf.name: leaf.pieces[0] for leaf in leaves if leaf.name in boxes and leaf.pieces}
    mine = tuple(overlap for overlap in shared if group.rank in overlap.ranks)
    digests = digests_of([within(overlap.box, *pieces[overlap.name]) for overlap in mine])
    told = [iter(json.loads(data)) for data in group.gather(json.dumps(digests).encode())]
    for overlap in shared:
        first, *others = [(next(told[rank]), rank) for rank in overlap.ranks]
        for digest, rank in others:
            if digest != first[0]:
                raise UnsupportedState(
                    f"ranks {first[1]} and {rank} both hold {overlap.name}{overlap.box}, with different values; boxes "
                    "of Sharded may overlap only where they are equal. Give each rank its own box"
                )
    return mine


def within(region: Box, box: Box, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a detached view of one region of `tensor`, which fills `box`."""
    return tensor.detach()[region.relative_to(box.offset).slices()]


def _written(leaves: Sequence[Leaf], shared: Sequence[Overlap], rank: int) -> dict[str, tuple[Box, ...]]:
    """Returns `Agreement.written`: the lowest rank that holds an element writes it."""
    covered: dict[str, list[Box]] = {}
    for overlap in shared:
        if overlap.ranks[0] < rank:
            covered.setdefault(overlap.name, []).append(overlap.box)
    return {leaf.name: remainder(leaf.pieces[0][0], covered[leaf.name]) for leaf in leaves if leaf.name in covered}


def kind_of(leaves: Sequence[Leaf]) -> str:
    """Returns a digest of this rank's boxes: equal on ranks with the same boxes of the same tensors, whatever their
    values."""
    rows = sorted((leaf.name, leaf.dtype, [[box.offset, box.shape] for box, _ in leaf.pieces]) for leaf in leaves)
    return str(xxhash.xxh3_128_hexdigest(json.dumps(rows).encode()))


def _join_meshes(leaves: Sequence[Leaf], found: Mapping[str, Said], group: Group) -> dict[str, Placed]:
    """Returns, by name, the mesh that several meshes form together, for DTensors that are equal on all of these.
    Collective if there are any.

    FSDP on one axis of a mesh and tensor parallelism on the other make such tensors: one that is not tensor-parallel is
    sharded on the first axis alone, once for each rank of the other.
    """
    candidates = {name: placed for name, said in sorted(found.items()) if (placed := _alike(said)) is not None}
    if not candidates:
        return {}
    digests = {leaf.name: digests_of([t for _, t in leaf.pieces]) for leaf in leaves if leaf.name in candidates}
    by_rank = [json.loads(data) for data in group.gather(json.dumps(digests).encode())]
    return {
        name: placed
        for name, placed in candidates.items()
        if all(len({str(by_rank[rank][name]) for rank in replicas}) == 1 for replicas in _columns(placed.mesh))
    }


def _alike(said: Said) -> Placed | None:
    """Stacks the meshes of a DTensor along a new first axis; None unless there are several that differ only in their
    ranks."""
    kinds = sorted({(row.dtype, tuple(row.shape), row.how) for row, _ in said})
    if len(kinds) == 1 or any(how in ("plain", "per-rank", "by-hand") for _, _, how in kinds):
        return None
    found = [json.loads(how) for _, _, how in kinds]
    shapes = {
        (dtype, shape, str(mesh_shape), str(p))
        for (dtype, shape, _), (mesh_shape, _, p) in zip(kinds, found, strict=True)
    }
    ranks = tuple(rank for _, ranks, _ in found for rank in ranks)
    if len(shapes) > 1 or tuple(sorted(ranks)) != _ranks(said):
        return None
    mesh = Mesh((len(found), *found[0][0]), ranks)
    return Placed(mesh, (sharding.Replicate(), *(sharding.decode(p) for p in found[0][2])), None)


def _columns(mesh: Mesh) -> list[tuple[int, ...]]:
    """Returns groups of ranks that have the same coordinates on all axes but the first."""
    step = len(mesh.ranks) // mesh.shape[0]
    return list(zip(*(mesh.ranks[i : i + step] for i in range(0, len(mesh.ranks), step)), strict=True))


def _row(leaf: Leaf, group: Group, digest: str) -> Row:
    how = "plain" if isinstance(leaf.held, Plain) else _describe(_in_group(leaf, group))
    box = None
    if isinstance(leaf.held, ByHand) and leaf.pieces:
        box = leaf.pieces[0][0].offset, leaf.pieces[0][0].shape
    shape = () if how == "per-rank" else leaf.shape
    return Row(leaf.dtype, shape, how, leaf.owner is not None, leaf.frozen, digest, box, leaf.tied)


@lru_cache(maxsize=64)  # its text lists all ranks of a mesh, and many tensors are held alike
def _describe(holding: Holding) -> str:
    if isinstance(holding, OwnPerRank):
        return "per-rank"
    if isinstance(holding, ByHand):
        return "by-hand"
    return json.dumps([holding.mesh.shape, holding.mesh.ranks, [sharding.encode(p) for p in holding.placements]])


_meshes: WeakKeyDictionary[Group, dict[Mesh, Mesh]] = WeakKeyDictionary()
_placed: WeakKeyDictionary[Group, dict[Placed, Placed]] = WeakKeyDictionary()
"""Meshes and placements in a group's ranks, by the same in the world's ranks: thousands of leaves share one."""


def _in_group(leaf: Leaf, group: Group) -> Holding:
    """Returns how a leaf is held, with its mesh in the group's ranks instead of the world's."""
    held = leaf.held
    assert not isinstance(held, Plain)
    if not isinstance(held, Placed):
        return held
    meshes = _meshes.setdefault(group, {})
    if held.mesh not in meshes:
        own = {group.global_rank(rank): rank for rank in range(group.size)}
        outside = [rank for rank in held.mesh.ranks if rank not in own]
        if outside:
            raise UnsupportedState(
                f"{leaf.name}: its mesh has rank(s) {outside[:8]}, which are not in the process group of the "
                "checkpoint; pass process_group= with all ranks that hold the state"
            )
        meshes[held.mesh] = Mesh(held.mesh.shape, tuple(own[rank] for rank in held.mesh.ranks))
    known = _placed.setdefault(group, {})
    return known.get(held) or known.setdefault(held, replace(held, mesh=meshes[held.mesh]))


def _holding_alone(leaf: Leaf, group: Group) -> Holding:
    return _replicated((0,)) if isinstance(leaf.held, Plain) else _in_group(leaf, group)


@lru_cache(maxsize=64)
def _replicated(ranks: tuple[int, ...]) -> Placed:
    """Returns one object for all tensors of the same ranks: agreements and layouts are compared at every save."""
    return Placed(Mesh((len(ranks),), ranks), (sharding.Replicate(),), None)


def _check(name: str, said: Said) -> None:
    """Raises UnsupportedState if a name stands for different tensors, ReplicasDiffer if an optimizer owns it and values
    differ."""
    kinds = {(row.dtype, tuple(row.shape), row.how) for row, _ in said}
    digests = {row.digest for row, _ in said}
    owned = any(row.is_owned for row, _ in said)
    error: type[UnsupportedState] = UnsupportedState
    alone = ""
    if len(kinds) > 1 and (owned or any(how != "plain" for _, _, how in kinds)):
        what = f"is not the same tensor on ranks {[*_ranks(said)[:8]]}: " + "; ".join(map(str, sorted(kinds)[:3]))
        if _alike(said) is not None:
            what += f", alike but for the ranks, with different values. If it should be the same there, {DIVERGED}"
    elif len(digests) > 1 and owned:
        what = (
            f"is owned by an optimizer and differs between ranks {_differing(said)}, though nothing shards it. If "
            f"it should be the same there, {DIVERGED}"
        )
        alone = (
            "; if it is kept for a parameter that one rank alone steps, the others must drop it: optimizer.state.pop"
        )
        error = ReplicasDiffer
    else:
        return
    raise error(
        f"{name} {what}. If these are different tensors, give them different names (stage-global ones in a pipeline); "
        "if they are pieces of one, use DTensor or Sharded(tensor, offset, shape); if each rank has its own, PerRank"
        f"{alone}"
    )


def _differing(said: Said) -> str:
    first: dict[str, int] = {}
    for row, (rank, *_) in sorted(said, key=operator.itemgetter(1)):
        first.setdefault(row.digest, rank)
    return " and ".join(map(str, list(first.values())[:2]))


def _holding(leaf: Leaf, said: Said, group: Group) -> Holding:
    if not isinstance(leaf.held, Plain):
        return _in_group(leaf, group)
    kinds = {(row.dtype, tuple(row.shape), row.digest) for row, _ in said}
    known = any(row.digest == OWN for row, _ in said)
    if len(kinds) == 1 and not known:
        return _replicated(_ranks(said))
    if group.rank == _ranks(said)[0] and not known:
        log.warning(
            "%s differs between ranks %s; each rank's own is saved. Wrap it in PerRank(...) if that is intended; if "
            "not, the ranks have diverged",
            leaf.name,
            _differing(said),
        )
    return OwnPerRank()
