"""The planner: which shards this rank copies, and from where, as long as the state stays the same.

Nothing is planned anew, and nothing compared between ranks, for a state whose tensors are those of the last save.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from ckptlib.errors import StateChanged
from ckptlib.format.body_layout import ALIGN_FROM_BYTES, body_nbytes, lay_out_in_order
from ckptlib.format.box import Box
from ckptlib.format.layout import ByHand, Layout, OwnPerRank, Placed
from ckptlib.format.table import Table
from ckptlib.ranks.group import Group
from ckptlib.saving.agreement import Agreement, Row, agree, rows_of, within
from ckptlib.saving.assign import assign, writes
from ckptlib.saving.shared import Shared, prove, shared_of
from ckptlib.staging.pair import CopySource
from ckptlib.staging.replica_digests import Replica, ReplicaDigests, Way
from ckptlib.state.collector import Flat
from ckptlib.state.leaf import Leaf, Plain
from ckptlib.state.structure import same

Overlap = Callable[[Leaf], bool]
"""Whether its only writer waits at the fence; asked once for all leaves of one owner."""

Shape = tuple[tuple[object, ...], ...]
"""Of every leaf: the properties that a plan depends upon."""


Order = tuple[tuple[int, int, Box | None], ...]
"""Leaves and their pieces; and the region of a piece that is meant, in the tensor's global coordinates; None: all."""

_Late: TypeAlias = dict[int, bool]
"""By owner: whether its tensors are copied behind the fence."""


@dataclass(frozen=True)
class Plan:
    """The shards that this rank copies."""

    shape: Shape
    layout: Layout
    table: Table
    order: Order
    """Per shard of the table."""
    body_nbytes: int
    """Of a slot."""
    shared: tuple[Shared, ...]
    """Shards that other ranks hold, too; one of them writes each for all."""
    puts_layout: bool = True
    """Whether this is the first rank with this layout, which puts it for all that have it."""


@dataclass(frozen=True)
class Alike:
    """Large shards of another rank's snapshot that this rank holds as well: replicas, as the layout has it."""

    table: Table
    """Of that rank."""
    offsets: tuple[int, ...]
    """In the body of a slot laid out so."""
    order: Order


@dataclass(frozen=True)
class _Sources:
    """The copies of one save, and the properties that they depended upon."""

    order: Order
    leaves: list[Leaf]
    late: _Late
    sources: list[CopySource]
    """In this order."""


@dataclass(frozen=True)
class _Digests:
    """What digests the replicas of one save, and the properties that it depended upon."""

    plan: Plan
    leaves: list[Leaf]
    late: _Late
    moving: frozenset[str]
    digests: ReplicaDigests


class Planner:
    """Plans the snapshots of one rank, and keeps plans for as long as they hold. Main thread."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._agreement: Agreement | None = None
        self._plan: Plan | None = None
        self._leaves: list[Leaf] = []
        """Those that the plan stood for last."""
        self._changed = False
        """Whether the last comparison found another state than the one before."""
        self._sources: dict[int, _Sources] = {}
        """By the rank whose snapshot it is."""
        self._alike: dict[int, tuple[Plan, Alike]] = {}
        """By that rank; each with the own plan that it was found for."""
        self._own: frozenset[str] = frozenset()
        """Plain tensors that have differed between ranks."""
        self._moving: frozenset[str] = frozenset()
        """Frozen parameters that have been seen to change."""
        self._digests: _Digests | None = None
        self._one_of_each: tuple[list[Leaf], dict[int, Leaf]] = [], {}
        """Leaves, and by the id of each owner one of them: an optimizer may have an `==` of its own, and no hash."""
        self.must_compare = False
        """Whether the ranks are to compare what they hold before the next save."""

    @property
    def agreed(self) -> bool:
        """Whether the ranks have ever compared their states."""
        return self._agreement is not None

    def rows(self, flat: Flat) -> dict[str, Row]:
        """This rank's description of its state, when all compare."""
        return rows_of(flat.leaves, self._group, self._own)

    def agree(self, flat: Flat, rows: dict[str, Row]) -> Plan:
        """The plan that follows from all ranks' descriptions. Collective. Raises on all of them where they do not
        agree."""
        self.must_compare = True  # until it is done
        agreement = agree(flat.leaves, rows, self._group)
        known = self._known(flat) if agreement == self._agreement else None
        self._agreement = agreement
        plan = self._plan = self._with_putter(self._plan_for(flat, known))
        prove(flat.leaves, plan.shared, self._group)
        if self._group.size > 1:
            plain = {leaf.name for leaf in flat.leaves if isinstance(leaf.held, Plain)}
            self._own |= {name for name in plain if isinstance(agreement.holdings.get(name), OwnPerRank)}
        self.must_compare = self._restless(known is None)
        return plan

    def _with_putter(self, plan: Plan) -> Plan:
        """The same, once it is known which rank puts the layout. Collective."""
        by_rank = self._group.gather(plan.layout.digest.encode()) if self._group.size > 1 else []
        puts = not by_rank or by_rank.index(by_rank[self._group.rank]) == self._group.rank
        return plan if plan.puts_layout == puts else replace(plan, puts_layout=puts)

    def _restless(self, changed: bool) -> bool:
        """Whether the state changes from save to save, so that it had better be compared before each."""
        before, self._changed = self._changed, changed
        return changed and before

    def plan(self, flat: Flat) -> Plan:
        """The plan that was last agreed upon. Raises StateChanged where this rank's state is another."""
        known = self._known(flat)
        if known is None:
            self.must_compare = True
            raise StateChanged(
                f"the state of rank {self._group.rank} has other tensors than at the previous save"
                f"{self._news(flat)}; all ranks compare theirs before the next save"
            )
        return self._plan_for(flat, known)

    def _news(self, flat: Flat) -> str:
        """The change since the last plan, for messages."""
        assert self._plan is not None
        before = {name for name, *_ in self._plan.shape}
        new = [leaf.name for leaf in flat.leaves if leaf.name not in before]
        return f" (new: {', '.join(new[:3])}{', ...' if len(new) > 3 else ''})" if new else ""

    def _known(self, flat: Flat) -> Plan | None:
        """The last plan, unless something that it depends upon has changed."""
        known = self._plan
        if known is None or known.layout.objects != flat.objects:
            return None
        return known if same(self._leaves, flat.leaves) or known.shape == _shape(flat.leaves) else None

    def _plan_for(self, flat: Flat, known: Plan | None) -> Plan:
        self._plan = self._make(flat) if known is None else known
        self._leaves = flat.leaves
        return self._plan

    def let_go(self, flat: Flat) -> None:
        """Drops objects that were made for the last snapshot alone. `flat`: of that snapshot."""
        if not flat.lends:
            return
        self._one_of_each = [], {}
        self._let_go_of_digests()
        self._leaves = _kept(self._leaves)
        self._sources = {
            rank: replace(
                known,
                leaves=_kept(known.leaves),
                sources=[s if not s.lent else CopySource(s.name, _NONE, s.overlap, True) for s in known.sources],
            )
            for rank, known in self._sources.items()
        }

    def forget_tensors(self) -> None:
        """Drops all that holds a tensor of the state; the plan stays."""
        self._leaves, self._sources, self._one_of_each = [], {}, ([], {})
        self._let_go_of_digests()

    def _let_go_of_digests(self) -> None:
        if self._digests is not None:
            self._digests.digests.let_go()
            self._digests = replace(self._digests, leaves=[])

    def _make(self, flat: Flat) -> Plan:
        assert self._agreement is not None
        by = self._agreement
        entries = assign(flat.leaves, by.holdings, partial=by.holders)
        layout = Layout(self._group.size, tuple(entries), by.aliases, flat.objects)
        shards: list[tuple[int, Box]] = []
        places: list[tuple[int, int, Box | None]] = []
        mine: dict[int, bool] = {}  # by id of a holding, of which there are few
        for i, leaf in enumerate(flat.leaves):
            name = leaf.name
            if name in by.aliases:
                continue
            tensor = layout.index[name]
            if name in by.written:
                shards += [(tensor, box) for box in by.written[name]]
                places += [(i, 0, box) for box in by.written[name]]
                continue
            entry, holders = entries[tensor], by.holders.get(name)
            if holders is not None:
                is_mine = writes(entry, self._group.rank, holders)
            elif (known := mine.get(id(entry.holding))) is not None:
                is_mine = known
            else:
                is_mine = mine[id(entry.holding)] = writes(entry, self._group.rank)
            if is_mine:
                for piece, (box, _) in enumerate(leaf.pieces):
                    shards.append((tensor, box))
                    places.append((i, piece, None))
        table, positions = lay_out_in_order(layout, shards)
        order = tuple(map(places.__getitem__, positions))
        shared = shared_of(flat.leaves, by, self._group.rank)
        return Plan(_shape(flat.leaves), layout, table, order, body_nbytes(table), shared)

    def sources(self, leaves: list[Leaf], plan: Plan, overlap: Overlap) -> list[CopySource]:
        """The sources of all copies, in the table's order; the very ones of the last save where nothing changed."""
        return self._sources_of(self._group.rank, plan.order, leaves, overlap)

    def alike(self, rank: int, table: Table, plan: Plan) -> Alike | None:
        """Which large shards of another rank's snapshot this rank could copy from its own memory; None: none.

        A replica, by the layout, may have changed since: a copy counts only when its digests are those of that rank.
        """
        if table.layout != plan.layout.digest:
            return None
        known = self._alike.get(rank)
        if known is None or known[0] is not plan or known[1].table is not table:
            known = self._alike[rank] = plan, _find_alike(table, plan, self._leaves)
        return known[1] if known[1].order else None

    def sources_alike(self, rank: int, alike: Alike, leaves: list[Leaf], overlap: Overlap) -> list[CopySource]:
        """As `sources`, in the order of `alike`."""
        return self._sources_of(rank, alike.order, leaves, overlap)

    def digests(self, leaves: list[Leaf], plan: Plan, overlap: Overlap) -> ReplicaDigests:
        """Digests of shards that other ranks hold, too; the very object of the last save where nothing changed."""
        late, known = self._late(leaves, overlap), self._digests
        if (
            known is None
            or known.plan is not plan
            or not same(known.leaves, leaves)
            or known.late != late
            or known.moving != self._moving
        ):
            replicas = [self._replica(shared, leaves, late) for shared in plan.shared]
            made = ReplicaDigests(replicas, None if known is None else known.digests)
            known = self._digests = _Digests(plan, leaves, late, self._moving, made)
        return known.digests

    def _replica(self, shared: Shared, leaves: list[Leaf], late: _Late) -> Replica:
        leaf = leaves[shared.leaf]
        if leaf.owner is not None:
            way = Way.SAMPLED
        else:
            way = Way.FROZEN if leaf.frozen and leaf.name not in self._moving else Way.WHOLE
        return Replica(shared.ranks, leaf.name, shared.tensor(leaves), late[id(leaf.owner)], way)

    def note_moved(self, names: frozenset[str]) -> None:
        """These frozen parameters change after all; on all ranks that hold them at the same step."""
        self._moving |= names

    def _sources_of(self, rank: int, order: Order, leaves: list[Leaf], overlap: Overlap) -> list[CopySource]:
        late = self._late(leaves, overlap)
        known = self._sources.get(rank)
        known = known if known is not None and known.order is order else None
        if known is not None and known.late == late and same(known.leaves, leaves):
            return known.sources
        found = []
        for n, (i, piece, region) in enumerate(order):
            leaf, is_late = leaves[i], late[id(leaves[i].owner)]
            if known is not None and known.leaves[i] is leaf:
                source = known.sources[n]
                found.append(source if source.overlap == is_late else replace(source, overlap=is_late))
            else:
                # detached: what `p.data = x` puts in place of this memory must not be copied instead, least of all
                # past its end
                box, tensor = leaf.pieces[piece]
                cut = tensor.detach() if region is None else within(region, box, tensor)
                found.append(CopySource(leaf.name, cut, is_late, leaf.lent))
        self._sources[rank] = _Sources(order, leaves, late, found)
        return found

    def _late(self, leaves: list[Leaf], overlap: Overlap) -> _Late:
        if self._one_of_each[0] is not leaves:
            owners = map(id, map(operator.attrgetter("owner"), leaves))
            self._one_of_each = leaves, dict(zip(owners, leaves, strict=True))
        return {owner: overlap(leaf) for owner, leaf in self._one_of_each[1].items()}


def _find_alike(table: Table, plan: Plan, leaves: list[Leaf]) -> Alike:
    by_name = {leaf.name: i for i, leaf in enumerate(leaves)}
    sizes = table.sizes(plan.layout)
    offsets, order = [], []
    for tensor, box, nbytes, offset in zip(table.tensors, table.boxes, sizes, table.begins(sizes), strict=True):
        entry = plan.layout.tensors[tensor]
        if nbytes < ALIGN_FROM_BYTES or entry.name not in by_name or not isinstance(entry.holding, Placed):
            continue
        i = by_name[entry.name]
        for piece, (own, _) in enumerate(leaves[i].pieces):
            if own == box:
                offsets.append(offset)
                order.append((i, piece, None))
    return Alike(table, tuple(offsets), tuple(order))


_NONE = torch.empty(0, device="cpu")


def _kept(leaves: list[Leaf]) -> list[Leaf]:
    """Replaces a lent leaf by one without a tensor, which equals nothing."""
    return [replace(leaf, pieces=()) if leaf.lent else leaf for leaf in leaves]


def _shape(leaves: list[Leaf]) -> Shape:
    return tuple((leaf.name, leaf.dtype, leaf.shape, leaf.held, leaf.tied, _cut(leaf)) for leaf in leaves)


def _cut(leaf: Leaf) -> tuple[Box, ...]:
    """The boxes that nothing but the pieces tells of."""
    return tuple(box for box, _ in leaf.pieces) if isinstance(leaf.held, ByHand) else ()
