"""Plans which shards this rank copies, and from where, for as long as the state stays the same.

If the tensors are those of the last save, nothing is planned anew, and nothing compared between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ckptlib.errors import StateChanged
from ckptlib.format.body_layout import ALIGN_FROM_BYTES, body_nbytes, lay_out_in_order
from ckptlib.format.box import Box
from ckptlib.format.layout import ByHand, Layout, OwnPerRank, Placed
from ckptlib.format.table import Table
from ckptlib.ranks.group import Group
from ckptlib.saving.agreement import Agreement, Row, agree, rows_of
from ckptlib.saving.assign import assign, writes
from ckptlib.saving.shared import Shared, prove, shared_of
from ckptlib.saving.sources import Late, Order, Overlap, Sources, kept
from ckptlib.staging.pair import CopySource
from ckptlib.staging.replica_digests import Replica, ReplicaDigests, Way
from ckptlib.state.collector import Flat
from ckptlib.state.leaf import Leaf, Plain
from ckptlib.state.structure import same

Shape = tuple[tuple[object, ...], ...]
"""The properties of every leaf that a plan depends on."""


@dataclass(frozen=True)
class Plan:
    """The shards that this rank copies."""

    shape: Shape
    layout: Layout
    table: Table
    order: Order
    """One entry for each shard of the table."""
    body_nbytes: int
    """Bytes of a slot's body."""
    shared: tuple[Shared, ...]
    """Shards that other ranks hold, too; one rank writes each for all."""
    puts_layout: bool = True
    """Whether this is the first rank with this layout, which puts it for all that have it."""


@dataclass(frozen=True)
class Alike:
    """Large shards of another rank's snapshot that this rank holds as well: replicas, as the layout has it."""

    table: Table
    """The table of that rank's snapshot."""
    offsets: tuple[int, ...]
    """Offsets of the shards in the body of a slot with that table."""
    order: Order


@dataclass(frozen=True)
class _Digests:
    """The digests of one save's replicas, and the properties that they depended on."""

    plan: Plan
    leaves: list[Leaf]
    late: Late
    moving: frozenset[str]
    digests: ReplicaDigests


class Planner:
    """Plans the snapshots of one rank, and keeps plans for as long as they hold. Main thread."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._agreement: Agreement | None = None
        self._plan: Plan | None = None
        self._leaves: list[Leaf] = []
        """The leaves that the plan was last used for."""
        self._changed = False
        """Whether the last comparison found another state than the one before."""
        self._sources = Sources()
        """Where the copies of snapshots come from."""
        self._alike: dict[int, tuple[Plan, Alike]] = {}
        """What is alike with each rank's snapshot, by that rank; each with the own plan that it was found for."""
        self._own: frozenset[str] = frozenset()
        """Plain tensors that have differed between ranks."""
        self._moving: frozenset[str] = frozenset()
        """Frozen parameters that have been seen to change."""
        self._digests: _Digests | None = None
        self.must_compare = False
        """Whether the ranks must compare what they hold before the next save."""

    @property
    def agreed(self) -> bool:
        """Whether the ranks have ever compared their states."""
        return self._agreement is not None

    def rows(self, flat: Flat) -> dict[str, Row]:
        """Returns this rank's description of its state, for a comparison of all ranks."""
        return rows_of(flat.leaves, self._group, self._own)

    def agree(self, flat: Flat, rows: dict[str, Row]) -> Plan:
        """Returns the plan that follows from all ranks' descriptions. Collective. Raises on all ranks if they do not
        agree."""
        self.must_compare = True  # stays so if this fails
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
        """Returns the plan, which tells now whether this rank puts the layout. Collective."""
        by_rank = self._group.gather(plan.layout.digest.encode()) if self._group.size > 1 else []
        puts = not by_rank or by_rank.index(by_rank[self._group.rank]) == self._group.rank
        return plan if plan.puts_layout == puts else replace(plan, puts_layout=puts)

    def _restless(self, changed: bool) -> bool:
        """Returns whether the state changes from save to save, so that it had better be compared before each."""
        before, self._changed = self._changed, changed
        return changed and before

    def plan(self, flat: Flat) -> Plan:
        """Returns the plan that was last agreed on. Raises StateChanged if this rank's state is another."""
        known = self._known(flat)
        if known is None:
            self.must_compare = True
            raise StateChanged(
                f"the state of rank {self._group.rank} has other tensors than at the previous save"
                f"{self._news(flat)}; all ranks compare theirs before the next save"
            )
        return self._plan_for(flat, known)

    def _news(self, flat: Flat) -> str:
        """Returns the new tensors since the last plan, for messages."""
        assert self._plan is not None
        before = {name for name, *_ in self._plan.shape}
        new = [leaf.name for leaf in flat.leaves if leaf.name not in before]
        return f" (new: {', '.join(new[:3])}{', ...' if len(new) > 3 else ''})" if new else ""

    def _known(self, flat: Flat) -> Plan | None:
        """Returns the last plan; None if anything that it depends on has changed."""
        known = self._plan
        if known is None or known.layout.objects != flat.objects:
            return None
        return known if same(self._leaves, flat.leaves) or known.shape == _shape(flat.leaves) else None

    def _plan_for(self, flat: Flat, known: Plan | None) -> Plan:
        self._plan = self._make(flat) if known is None else known
        self._leaves = flat.leaves
        return self._plan

    def let_go(self, flat: Flat) -> None:
        """Drops objects that were made for the last snapshot alone. `flat`: the state of that snapshot."""
        if not flat.lends:
            return
        self._sources.let_go()
        self._let_go_of_digests()
        self._leaves = kept(self._leaves)

    def forget_tensors(self) -> None:
        """Drops everything that holds a tensor of the state; the plan stays."""
        self._leaves = []
        self._sources.forget_tensors()
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
        mine: dict[int, bool] = {}  # by id of a holding: there are few
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
        """Returns the sources of all copies, in the table's order; the same list as at the last save if nothing
        changed."""
        self._sources.look_for_writes(leaves)
        return self._sources.of(self._group.rank, plan.order, leaves, overlap)

    def alike(self, rank: int, table: Table, plan: Plan) -> Alike | None:
        """Returns the large shards of another rank's snapshot that this rank could copy from its own memory; None for
        none.

        A tensor that is a replica in the layout may have changed since: a copy counts only if its digests are that
        rank's.
        """
        if table.layout != plan.layout.digest:
            return None
        known = self._alike.get(rank)
        if known is None or known[0] is not plan or known[1].table is not table:
            known = self._alike[rank] = plan, _find_alike(table, plan, self._leaves)
        return known[1] if known[1].order else None

    def sources_alike(self, rank: int, alike: Alike, leaves: list[Leaf], overlap: Overlap) -> list[CopySource]:
        """Returns the sources of these copies, as `sources` does, in the order of `alike`."""
        return self._sources.of(rank, alike.order, leaves, overlap)

    def digests(self, leaves: list[Leaf], plan: Plan, overlap: Overlap) -> ReplicaDigests:
        """Returns digests of shards that other ranks hold, too; the same object as at the last save if nothing
        changed."""
        late, known = self._sources.late(leaves, overlap), self._digests
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

    def _replica(self, shared: Shared, leaves: list[Leaf], late: Late) -> Replica:
        assert self._agreement is not None
        leaf = leaves[shared.leaf]
        is_late = leaf.owner is not None and late[id(leaf.owner), leaf.frozen]
        if leaf.name in self._agreement.unevenly_owned:  # ranks that read different bytes would seem to differ
            way = Way.WHOLE
        elif leaf.owner is not None:
            way = Way.SAMPLED
        else:
            way = Way.FROZEN if leaf.frozen and leaf.name not in self._moving else Way.WHOLE
        return Replica(shared.ranks, leaf.name, shared.tensor(leaves), is_late, way)

    def note_moved(self, names: frozenset[str]) -> None:
        """Notes frozen parameters that change after all; on all ranks that hold them, at the same step."""
        self._moving |= names

    def note_written(self, names: Iterable[str]) -> None:
        """Notes frozen parameters that change after all, as this rank alone has seen: they no longer overlap."""
        self._sources.note_written(names)


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


def _shape(leaves: list[Leaf]) -> Shape:
    return tuple((leaf.name, leaf.dtype, leaf.shape, leaf.held, leaf.tied, _cut(leaf)) for leaf in leaves)


def _cut(leaf: Leaf) -> tuple[Box, ...]:
    """Returns the boxes of a leaf that is cut by hand: only its pieces tell them."""
    return tuple(box for box, _ in leaf.pieces) if isinstance(leaf.held, ByHand) else ()
