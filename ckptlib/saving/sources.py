"""Says where each copy of a snapshot comes from, and which copies overlap with the training.

What an optimizer owns overlaps, since its only writer waits at the fence. Frozen parameters overlap, too, though no
fence guards them: a snapshot counts only if their digests are those of the snapshot before.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from ckptlib.format.box import Box
from ckptlib.saving.agreement import within
from ckptlib.staging.pair import OVERLAP_FROM_BYTES, CopySource
from ckptlib.staging.watch import Counts, Watch
from ckptlib.state.leaf import Leaf
from ckptlib.state.structure import same

Overlap = Callable[[Leaf], bool]
"""Returns whether a leaf may be copied behind the fence, since its only writer waits there, or it is frozen. Asked once
for all frozen leaves of an owner, and once for its others."""

Order = tuple[tuple[int, int, Box | None], ...]
"""For each shard, its leaf, the leaf's piece, and the region of that piece in the tensor's global coordinates; None for
all."""

Late: TypeAlias = dict[tuple[int, bool], bool]
"""Whether tensors are copied behind the fence, by the id of their owner, and whether they are frozen. By the id: an
optimizer may define its own `==`, and no hash."""

FROZEN_AFTER = 3
"""How many saves copy what is frozen at once, before it overlaps. What changes from save to save has shown that by
then: weights of a teacher or a target network ask for no gradient, either."""

_NONE = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class _Known:
    """The copies of one save, and the properties that they depended on."""

    order: Order
    leaves: list[Leaf]
    late: Late
    sources: list[CopySource]
    """The sources, in the order of `order`."""
    waits: dict[int, int]
    """How many more saves copy a frozen parameter at once, by the number of its leaf, for those that wait."""


class Sources:
    """The sources of one rank's copies, kept for as long as they hold. Main thread."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        """The sources of each snapshot, by the rank that it belongs to."""
        self._written: frozenset[str] = frozenset()
        """Frozen parameters whose bytes this rank saw to differ between two of its snapshots."""
        self._frozen: tuple[list[Leaf], Counts, Watch] = [], Counts([]), Watch([])
        """Leaves; torch's counts of the writes to those that are frozen; and what watches these since the last save."""
        self._counted: frozenset[str] = frozenset()
        """Frozen parameters to which torch counted a write between the last two saves."""
        self._one_of_each: tuple[list[Leaf], dict[tuple[int, bool], Leaf]] = [], {}
        """Leaves, and one leaf of each kind; see `Late`."""

    def of(self, rank: int, order: Order, leaves: list[Leaf], overlap: Overlap) -> list[CopySource]:
        """Returns the sources of that rank's snapshot in that order; the same list as at the last save if nothing
        changed."""
        late = self.late(leaves, overlap)
        known = self._known.get(rank)
        known = known if known is not None and known.order is order else None
        if (
            known is not None
            and known.late == late
            and same(known.leaves, leaves)
            and not (known.waits or self._counted)
        ):
            return known.sources
        frozen = {i for i, leaf in enumerate(leaves) if self._may_overlap_frozen(leaf)}
        waits = {i: left for i in frozen if (left := self._wait(known, i, leaves[i]))}
        found = []
        for n, (i, piece, region) in enumerate(order):
            leaf = leaves[i]
            is_late = late[id(leaf.owner), leaf.frozen] and (not _is_unowned(leaf) or (i in frozen and i not in waits))
            if known is not None and known.leaves[i] is leaf:
                source = known.sources[n]
                found.append(source if source.overlap == is_late else replace(source, overlap=is_late))
            else:
                # detached: if `p.data = x` replaces this memory, the new one must not be copied instead, least of all
                # past its end
                box, tensor = leaf.pieces[piece]
                cut = tensor.detach() if region is None else within(region, box, tensor)
                # small ones are copied at once, and share chunks, whose digests would tell of others' changes
                proven = i in frozen and cut.nbytes >= OVERLAP_FROM_BYTES
                found.append(CopySource(leaf.name, cut, is_late, leaf.outer, leaf.lent, proven))
        self._known[rank] = _Known(order, leaves, late, found, waits)
        return found

    def _wait(self, known: _Known | None, i: int, leaf: Leaf) -> int:
        """Returns how many saves, with this one, copy a frozen parameter at once."""
        if known is None or known.leaves[i] is not leaf or leaf.name in self._counted:
            return FROZEN_AFTER
        return max(known.waits.get(i, 0) - 1, 0)

    def late(self, leaves: list[Leaf], overlap: Overlap) -> Late:
        """Returns which kinds of leaves are copied behind the fence."""
        if self._one_of_each[0] is not leaves:
            owners = map(id, map(operator.attrgetter("owner"), leaves))
            kinds = zip(owners, map(operator.attrgetter("frozen"), leaves), strict=True)
            self._one_of_each = leaves, dict(zip(kinds, leaves, strict=True))
        return {kind: overlap(leaf) for kind, leaf in self._one_of_each[1].items()}

    def look_for_writes(self, leaves: list[Leaf]) -> None:
        """Has frozen parameters to which torch counted a write since the last save wait again before they overlap: the
        copy would be torn if their bytes differ."""
        known, counts, watch = self._frozen
        self._counted = frozenset(watch.written)
        if known is not leaves:
            some = [leaf for leaf in leaves if self._may_overlap_frozen(leaf) and not leaf.lent]
            counts = Counts([(leaf.name, tensor, leaf.outer) for leaf in some for _, tensor in leaf.pieces])
        self._frozen = leaves, counts, Watch([counts])

    def note_written(self, names: Iterable[str]) -> None:
        """Notes frozen parameters that change after all, as this rank alone has seen: they no longer overlap."""
        self._written |= {*names}
        self._known = {}
        self._frozen = [], Counts([]), Watch([])

    def let_go(self) -> None:
        """Drops objects that were lent for the last snapshot alone."""
        self._one_of_each, self._frozen = ([], {}), ([], *self._frozen[1:])
        self._known = {
            rank: replace(
                known,
                leaves=kept(known.leaves),
                sources=[s if not s.lent else CopySource(s.name, _NONE, s.overlap, lent=True) for s in known.sources],
            )
            for rank, known in self._known.items()
        }

    def forget_tensors(self) -> None:
        """Drops everything that holds a tensor of the state."""
        self._known, self._one_of_each = {}, ([], {})
        self._frozen = [], Counts([]), Watch([])

    def _may_overlap_frozen(self, leaf: Leaf) -> bool:
        return _is_unowned(leaf) and leaf.name not in self._written


def kept(leaves: list[Leaf]) -> list[Leaf]:
    """Replaces each lent leaf by one without a tensor, which equals nothing."""
    return [replace(leaf, pieces=(), outer=None) if leaf.lent else leaf for leaf in leaves]


def _is_unowned(leaf: Leaf) -> bool:
    """Returns whether nobody is known to write to the leaf."""
    return leaf.frozen and leaf.owner is None
