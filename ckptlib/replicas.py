"""Agreement on what every rank holds: which plain tensors are replicas, and which ranks really have a tensor.

A DTensor says itself which ranks hold the same box. A plain tensor is a replica if its bytes are the same on all ranks
that have the name. Either may turn out untrue later: each save proves it anew (see `replica_digests`).
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import xxhash

from ckptlib import sharding
from ckptlib.check import add_up, check_of
from ckptlib.errors import ReplicasDiffer, UnsupportedState
from ckptlib.group import Group
from ckptlib.layout import ByHand, Holding, Mesh, PerRank, Placed, TensorEntry
from ckptlib.plan import holders_of
from ckptlib.state import Leaf, Plain
from ckptlib.tensor_digests import digests_of

log = logging.getLogger(__name__)

Row = tuple[str, list[int], str, bool, str]
"""dtype, global shape, how it is held, whether an optimizer owns it, digest of a plain tensor."""

OWN = "own"
"""Instead of the digest: this plain tensor has differed between ranks before, and is every rank's own from then on."""


@dataclass(frozen=True)
class Agreement:
    """What all ranks know of each other, for the names that this rank has."""

    holdings: Mapping[str, Holding]
    """How each tensor is held; writers are not chosen yet."""
    holders: Mapping[str, frozenset[int]]
    """The ranks that really have it, for names that not every rank of their mesh has."""


def rows_of(leaves: Sequence[Leaf], group: Group, own: Collection[str] = ()) -> dict[str, Row]:
    """What this rank holds, by name; reads plain tensors whole, for their digests. Not collective.

    `own`: plain tensors that have differed between ranks. Nothing in a group of one, which has nobody to tell it to.
    """
    if group.size == 1:
        return {}
    read = [leaf for leaf in leaves if isinstance(leaf.held, Plain) and leaf.pieces and leaf.name not in own]
    found = dict(zip((leaf.name for leaf in read), digests_of([leaf.pieces[0][1] for leaf in read]), strict=True))
    return {leaf.name: _row(leaf, group, OWN if leaf.name in own else found.get(leaf.name, "")) for leaf in leaves}


def agree(leaves: Sequence[Leaf], rows: Mapping[str, Row], group: Group) -> Agreement:
    """Compares what ranks hold. Collective; one small reduction where all hold the same.

    Raises UnsupportedState, on all ranks, for a name that stands for different tensors; ReplicasDiffer for one that an
    optimizer owns and that is not the same everywhere.
    """
    if group.size == 1:  # nobody to differ from: a tenth of the time, for thousands of small tensors
        return Agreement({leaf.name: _holding_alone(leaf, group) for leaf in leaves}, {})
    document = json.dumps(rows, sort_keys=True).encode()
    found: dict[str, dict[int, Row]] = {}
    if group.same(document):
        found = {name: dict.fromkeys(range(group.size), row) for name, row in rows.items()}
    else:
        for rank, data in enumerate(group.gather(zlib.compress(document, 1))):
            for name, row in json.loads(zlib.decompress(data)).items():
                found.setdefault(name, {})[rank] = row
    joined = _join_meshes(leaves, found, group)
    for name, by_rank in sorted(found.items()):
        if name not in joined:
            _check(name, by_rank)
    holdings = {leaf.name: joined.get(leaf.name) or _holding(leaf, found[leaf.name], group) for leaf in leaves}
    holders = {}
    for name, holding in holdings.items():
        have = frozenset(found[name])
        if isinstance(holding, Placed) and have != frozenset(holding.mesh.ranks):
            holders[name] = have
    return Agreement(holdings, holders)


@dataclass(frozen=True, slots=True)
class Shared:
    """One box that this rank holds, and others too."""

    ranks: tuple[int, ...]
    """All that hold it, ascending."""
    leaf: int
    piece: int


def shared_of(leaves: Sequence[Leaf], agreement: Agreement, rank: int) -> tuple[Shared, ...]:
    """In the same order on all ranks that hold them, those of the same ranks one behind the other."""
    ranks: dict[int, tuple[int, ...]] = {}
    found: list[tuple[tuple[int, ...], str, tuple[int, ...], int, int]] = []
    for i, leaf in enumerate(leaves):
        holding = agreement.holdings[leaf.name]
        if not isinstance(holding, Placed):
            continue
        holders = agreement.holders.get(leaf.name)
        if holders is None:
            if id(holding) not in ranks:  # plain tensors have few between them, and there may be thousands
                ranks[id(holding)] = holders_of(holding, rank)
            those = ranks[id(holding)]
        else:
            those = holders_of(holding, rank, holders)
        if len(those) > 1:
            found += [(those, leaf.name, box.offset, i, piece) for piece, (box, _) in enumerate(leaf.pieces)]
    return tuple(Shared(those, i, piece) for those, _, _, i, piece in sorted(found))


def prove(leaves: Sequence[Leaf], shared: Sequence[Shared], group: Group) -> None:
    """Compares DTensors that several ranks hold, whole. Collective; one small sum where all are alike.

    Raises ReplicasDiffer that names them, on all ranks.
    """
    if group.size == 1:
        return
    those = [s for s in shared if not isinstance(leaves[s.leaf].held, Plain)]
    digests = digests_of([leaves[s.leaf].pieces[s.piece][1] for s in those])
    by_ranks: dict[tuple[int, ...], str] = {}
    for s, digest in zip(those, digests, strict=True):
        by_ranks[s.ranks] = by_ranks.get(s.ranks, "") + digest
    check = check_of(0, group.rank, {ranks: text.encode() for ranks, text in by_ranks.items()})
    if add_up(*group.start_sum([check.low, check.high])()):
        return
    own = [
        [leaf.name, list(leaf.pieces[s.piece][0].offset), list(s.ranks), digest]
        for s, digest in zip(those, digests, strict=True)
        for leaf in (leaves[s.leaf],)
    ]
    first: dict[str, tuple[int, str]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank, data in enumerate(group.gather(zlib.compress(json.dumps(own).encode(), 1))):
        for name, offset, ranks, digest in json.loads(zlib.decompress(data)):
            there = first.setdefault(json.dumps([name, offset, ranks]), (rank, digest))
            if there[1] != digest:
                differing.setdefault(name, (there[0], rank))
    some = "; ".join(f"{name} on ranks {a} and {b}" for name, (a, b) in sorted(differing.items())[:8])
    raise ReplicasDiffer(
        f"{len(differing)} DTensor(s) that are replicas by their mesh differ between ranks: {some}. The ranks have "
        "drifted apart, or a host's memory is at fault: go on from the last step that was saved"
    )


def entries_of(leaves: Sequence[Leaf], agreement: Agreement) -> list[TensorEntry]:
    """The layout's rows of this rank's tensors, by name; writers are not chosen yet."""
    rows = (TensorEntry(leaf.name, leaf.dtype, leaf.shape, agreement.holdings[leaf.name]) for leaf in leaves)
    return sorted(rows, key=lambda entry: entry.name)


def kind_of(leaves: Sequence[Leaf]) -> str:
    """Names what this rank holds: alike on ranks with the same boxes of the same tensors, whatever is in them."""
    rows = sorted((leaf.name, leaf.dtype, [[box.offset, box.shape] for box, _ in leaf.pieces]) for leaf in leaves)
    return str(xxhash.xxh3_128_hexdigest(json.dumps(rows).encode()))


def _join_meshes(leaves: Sequence[Leaf], found: Mapping[str, Mapping[int, Row]], group: Group) -> dict[str, Placed]:
    """By name: the one mesh that several make, for DTensors that are equal on all of them. Collective if there are any.

    FSDP on one axis of a mesh and tensor parallelism on the other leave such: what the latter does not know is sharded
    on the first axis alone, once for each rank of the other.
    """
    candidates = {name: placed for name, by_rank in sorted(found.items()) if (placed := _alike(by_rank)) is not None}
    if not candidates:
        return {}
    digests = {leaf.name: digests_of([t for _, t in leaf.pieces]) for leaf in leaves if leaf.name in candidates}
    by_rank = [json.loads(data) for data in group.gather(json.dumps(digests).encode())]
    return {
        name: placed
        for name, placed in candidates.items()
        if all(len({str(by_rank[rank][name]) for rank in replicas}) == 1 for replicas in _columns(placed.mesh))
    }


def _alike(by_rank: Mapping[int, Row]) -> Placed | None:
    """The meshes of a DTensor, stacked along a new first axis, where they differ in their ranks only."""
    kinds = sorted({(dtype, tuple(shape), how) for dtype, shape, how, _, _ in by_rank.values()})
    if len(kinds) == 1 or any(how in ("plain", "per-rank", "by-hand") for _, _, how in kinds):
        return None
    found = [json.loads(how) for _, _, how in kinds]
    shapes = {
        (dtype, shape, str(mesh_shape), str(p))
        for (dtype, shape, _), (mesh_shape, _, p) in zip(kinds, found, strict=True)
    }
    ranks = tuple(rank for _, ranks, _ in found for rank in ranks)
    if len(shapes) > 1 or sorted(ranks) != sorted(by_rank):
        return None
    mesh = Mesh((len(found), *found[0][0]), ranks)
    return Placed(mesh, (sharding.Replicate(), *(sharding.decode(p) for p in found[0][2])), None)


def _columns(mesh: Mesh) -> list[tuple[int, ...]]:
    """The ranks at the same place on all axes but the first."""
    step = len(mesh.ranks) // mesh.shape[0]
    return list(zip(*(mesh.ranks[i : i + step] for i in range(0, len(mesh.ranks), step)), strict=True))


def _row(leaf: Leaf, group: Group, digest: str) -> Row:
    how = "plain" if isinstance(leaf.held, Plain) else _describe(_in_group(leaf, group))
    shape = [] if how == "per-rank" else list(leaf.shape)
    return leaf.dtype, shape, how, leaf.owner is not None, digest


def _describe(holding: Holding) -> str:
    if isinstance(holding, PerRank):
        return "per-rank"
    if isinstance(holding, ByHand):
        return "by-hand"
    return json.dumps([holding.mesh.shape, holding.mesh.ranks, [sharding.encode(p) for p in holding.placements]])


def _in_group(leaf: Leaf, group: Group) -> Holding:
    """How a leaf is held, its mesh in the group's ranks instead of the world's."""
    held = leaf.held
    assert not isinstance(held, Plain)
    if not isinstance(held, Placed):
        return held
    own = {group.global_rank(rank): rank for rank in range(group.size)}
    outside = [rank for rank in held.mesh.ranks if rank not in own]
    if outside:
        raise UnsupportedState(
            f"{leaf.name}: its mesh has rank(s) {outside[:8]}, which are not in the process group of the checkpoint; "
            "give process_group= with all ranks that hold the state"
        )
    return replace(held, mesh=Mesh(held.mesh.shape, tuple(own[rank] for rank in held.mesh.ranks)))


def _holding_alone(leaf: Leaf, group: Group) -> Holding:
    return _replicated((0,)) if isinstance(leaf.held, Plain) else _in_group(leaf, group)


@lru_cache(maxsize=64)
def _replicated(ranks: tuple[int, ...]) -> Placed:
    """One object for all tensors that the same ranks hold: agreements and layouts are compared at every save."""
    return Placed(Mesh((len(ranks),), ranks), (sharding.Replicate(),), None)


def _check(name: str, by_rank: Mapping[int, Row]) -> None:
    """Raises UnsupportedState where a name stands for different tensors, ReplicasDiffer where for different data."""
    kinds = {(dtype, tuple(shape), how) for dtype, shape, how, _, _ in by_rank.values()}
    digests = {digest for _, _, _, _, digest in by_rank.values()}
    owned = any(row[3] for row in by_rank.values())
    error: type[UnsupportedState] = UnsupportedState
    if len(kinds) > 1 and (owned or any(how != "plain" for _, _, how in kinds)):
        what = f"is not the same tensor on ranks {sorted(by_rank)[:8]}: " + "; ".join(map(str, sorted(kinds)[:3]))
    elif len(digests) > 1 and owned:
        what = f"is owned by an optimizer and differs between ranks {_differing(by_rank)}, though nothing shards it"
        error = ReplicasDiffer
    else:
        return
    raise error(
        f"{name} {what}. If these are different tensors, give them different names (stage-global ones in a pipeline); "
        "if they are pieces of one, use DTensor or Sharded(tensor, offset, shape); if each rank has its own, PerRank"
    )


def _differing(by_rank: Mapping[int, Row]) -> str:
    first: dict[str, int] = {}
    for rank, row in sorted(by_rank.items()):
        first.setdefault(row[4], rank)
    return " and ".join(map(str, list(first.values())[:2]))


def _holding(leaf: Leaf, by_rank: Mapping[int, Row], group: Group) -> Holding:
    if not isinstance(leaf.held, Plain):
        return _in_group(leaf, group)
    kinds = {(row[0], tuple(row[1]), row[4]) for row in by_rank.values()}
    known = any(row[4] == OWN for row in by_rank.values())
    if len(kinds) == 1 and not known:
        return _replicated(tuple(sorted(by_rank)))
    if group.rank == min(by_rank) and not known:
        log.warning(
            "%s differs between ranks %s; every rank's own is saved. Say PerRank(...) if that is meant, else it should "
            "have been the same",
            leaf.name,
            _differing(by_rank),
        )
    return PerRank()
