"""The findings of a pass over a state, reused by the next one where they still hold.

A section is a module or an optimizer. Its leaves are reused where the walk would make the same ones again: the same
tensors under the same names, each in the memory, the view and the placement that it had. That is compared column by
column, 0.5 us per tensor where the walk takes 6. The caller compares the owners.

The names and tensors of a section are told without asking for them where its structure is as it was: see
`ckptlib.state.structure` for modules, `ckptlib.state.entries` for optimizers.

A tensor beside them is asked about by itself. A `Memo` holds all of this, from one pass to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import torch

from ckptlib.format.values import Json
from ckptlib.state.entries import Entries
from ckptlib.state.leaf import Leaf
from ckptlib.state.places import Places
from ckptlib.state.structure import Structure, same

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that the leaves of a section depend upon."""

    names: Sequence[object]
    """Compared by value."""
    objects: Sequence[object]
    """Compared by identity; and kept, so that no other object can have it."""
    tensors: Sequence[torch.Tensor]
    """Compared by identity and by place."""


class Section(Generic[Made]):
    """A fingerprint, where its tensors lay, and the leaves that it gave."""

    __slots__ = ("_places", "made", "sight")

    def __init__(self, sight: Fingerprint, made: Made) -> None:
        self.sight = sight
        self._places = Places(sight.tensors)
        self.made = made

    def shows(self, sight: Fingerprint) -> bool:
        """Whether nothing has changed."""
        before = self.sight
        is_alike = before is sight or (
            same(before.tensors, sight.tensors) and same(before.objects, sight.objects) and before.names == sight.names
        )
        return is_alike and self._places.hold(sight.tensors)


@dataclass(slots=True)
class Found:
    """The findings of a pass, of a state or of a section of it."""

    leaves: list[Leaf] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)
    """All that were given out."""
    param_names: dict[int, str] = field(default_factory=dict)
    """By id of tensor: the first."""
    seen: dict[object, str] = field(default_factory=dict)
    """By what two names of one tensor have in common: the first of them."""
    own: set[int] = field(default_factory=set)
    """By id: the tensors of which every rank was said to have its own."""
    beside: list[Found] = field(default_factory=list)
    """Of a section: those that were found before it at its last pass, from all of which it is apart."""

    def is_apart_from(self, other: Found) -> bool:
        """Whether they have no name and no tensor in common. Of two views of keys, Python looks at the shorter."""
        return self.names.keys().isdisjoint(other.names.keys()) and self.seen.keys().isdisjoint(other.seen.keys())

    def take(self, other: Found) -> None:
        """Adds what is apart from this, as found later."""
        self.leaves += other.leaves
        self.names |= other.names
        self.seen |= other.seen
        self.own |= other.own
        if self.param_names.keys().isdisjoint(other.param_names.keys()):
            self.param_names |= other.param_names
        else:
            self.param_names = other.param_names | self.param_names


class Trace(NamedTuple):
    """What the leaves of a pass were made of: those that stand by themselves, and sections."""

    leaves: list[Leaf]
    sections: list[Found]

    def is_that_of(self, other: Trace) -> bool:
        """Whether the leaves are the very same."""
        return same(self.leaves, other.leaves) and same(self.sections, other.sections)


class KnownLeaf(NamedTuple):
    """A tensor, and the leaf that was made of it."""

    tensor: object
    at: object
    """Where and what its local data was: see `places`."""
    leaf: Leaf


class KnownModule(NamedTuple):
    """A module whose `state_dict()` gives nothing but the tensors of a section."""

    structure: Structure
    sight: Fingerprint


class KnownOptimizer(NamedTuple):
    """An optimizer that has nothing but hyper-parameters beside the tensors of a section."""

    entries: Entries
    sight: Fingerprint
    names: list[list[str]]
    """By group, of its parameters: those that modules of the same state gave them."""
    described: dict[str, Json]
    """As a layout has it."""


class Memo:
    """The findings of earlier passes. One for each state; entries that the state no longer has are forgotten."""

    def __init__(self) -> None:
        self.leaves: dict[str, KnownLeaf] = {}
        """By name."""
        self.last: list[Leaf] = []
        """All leaves of the last pass; none where some of them were lent."""
        self.trace = Trace([], [])
        """Of these."""
        self.owned: list[object] = []
        """Each optimizer, and behind it its parameters."""
        self.owners: dict[int, torch.optim.Optimizer] = {}
        """By id of parameter."""
        self.given: dict[int, torch.optim.Optimizer] = {}
        """Those of `owners` that the caller told."""
        self.sections: dict[tuple[str, bool], Section[Found]] = {}
        """By path, and whether it is per rank."""
        self.modules: dict[tuple[str, bool], KnownModule] = {}
        """By the same."""
        self.optimizers: dict[tuple[str, bool], KnownOptimizer] = {}
        """By the same."""

    def let_go(self) -> None:
        """Keeps no leaves but those of sections."""
        self.leaves.clear()
        self.last, self.trace = [], Trace([], [])
