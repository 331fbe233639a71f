"""Collects what a walk over a state finds, tensor by tensor and value by value.

A tensor that is the same object at the same address as in an earlier pass gives the same leaf object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ckptlib.devices import accelerator
from ckptlib.errors import UnsupportedState
from ckptlib.format import values
from ckptlib.format.layout import OwnPerRank
from ckptlib.format.paths import join
from ckptlib.format.tagged_values import MAX_DEPTH, is_unicode
from ckptlib.format.values import Json
from ckptlib.state.findings import Findings
from ckptlib.state.leaf import (
    PLAIN,
    Leaf,
    PerRank,
    Sharded,
    identity,
    identity_of_plain,
    is_elsewhere,
    leaf_of,
    leaf_of_plain,
    local_of,
    refuse_tensor,
)
from ckptlib.state.memo import KnownLeaf, Memo
from ckptlib.state.places import place, place_of_plain
from ckptlib.state.subclasses import apart, is_subclass, place_name
from ckptlib.state.visitor import SCALARS, check_depth, checked_key, too_deep


@dataclass
class Flat:
    """A whole state, flattened."""

    leaves: list[Leaf] = field(default_factory=list)
    """Not to be changed: the next pass may return the same list."""
    values: dict[str, Json] = field(default_factory=dict)
    objects: dict[str, Json] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    """The optimizers by path."""
    lends: bool = False
    """Whether any leaf is lent; see `Leaf.lent`."""

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors, each with its first name."""
        return {leaf.name: leaf.tied for leaf in self.leaves if leaf.tied is not None}


class Part(NamedTuple):
    """The arguments of `add_tensor`: an ordinary tensor, or an inner tensor of a subclass."""

    tensor: torch.Tensor
    name: str
    per_rank: bool


class Collector:
    """Collects the findings of one pass over a state, or over a section of it: each name once, a leaf for each
    tensor."""

    def __init__(self, memo: Memo, owners: dict[int, torch.optim.Optimizer]) -> None:
        """`owners`: the optimizer that owns each tensor, by the tensor's id."""
        self.findings = Findings()
        self.flat = Flat()
        self.owners = owners
        self.by_hand: dict[int, Sharded] = {}
        """The Sharded that each tensor is in, by the tensor's id."""
        self._inner: list[torch.Tensor] = []
        """Tensors that no leaf keeps: inner tensors of subclasses, and DTensors that were made for this pass. Kept here
        so that no other tensor of this pass can have the id of one, and be taken for it."""
        self._lent = False
        """Whether the next tensors came from a `state_dict()`, which may have made them for this pass."""
        self._made = False
        """Whether they were made for this pass, wherever they lie."""
        self._memo = memo

    def add_tensor(self, tensor: torch.Tensor | Sharded, name: str, per_rank: bool) -> None:
        if type(tensor) in PLAIN:
            self._add_plain_tensor(tensor, name, per_rank)  # type: ignore[arg-type]
            return
        self._claim(name)
        known = self._memo.leaves.get(name)
        if known is None or known.tensor is not tensor:
            refuse_tensor(tensor, name)
        found = self.findings.joined()
        found.param_names.setdefault(id(local_of(tensor)), name)
        if per_rank:
            found.own.add(id(local_of(tensor)))
        if isinstance(tensor, Sharded):
            self.by_hand[id(tensor.tensor)] = tensor
        key = None if per_rank else identity(tensor)
        leaf = self._leaf(tensor, name, per_rank, found.seen.get(key))
        if leaf is None:
            return  # this rank is outside of its mesh: it has no name here, and another tensor may get its id later
        if key is not None:
            found.seen.setdefault(key, name)
        found.leaves.append(leaf)

    def _add_plain_tensor(self, tensor: torch.Tensor, name: str, per_rank: bool) -> None:
        """Adds an ordinary tensor, asking each question once: nearly all tensors are such, and there may be
        thousands."""
        self._claim(name)
        known = self._memo.leaves.get(name)
        is_known = known is not None and known.tensor is tensor
        if not is_known:
            refuse_tensor(tensor, name)
        found, number = self.findings.joined(), id(tensor)
        found.param_names.setdefault(number, name)
        at = place_of_plain(tensor)
        tied: str | None = None
        if per_rank:
            found.own.add(number)
        elif (key := identity_of_plain(tensor, at)) is not None:
            first = found.seen.setdefault(key, name)
            tied = None if first is name else first
        owner = self.owners.get(number)
        if known is not None and is_known and known.at == at:
            leaf = known.leaf
            if leaf.owner is owner and leaf.tied == tied and isinstance(leaf.held, OwnPerRank) == per_rank:
                found.leaves.append(leaf)
                return
        elif is_known:
            refuse_tensor(tensor, name)  # it may have lost its memory
        made = leaf_of_plain(tensor, name, per_rank, owner, tied)
        if self._is_lent(tensor, owner):
            made = replace(made, lent=True)
        else:
            self._memo.leaves[name] = KnownLeaf(tensor, at, made)
        found.leaves.append(made)

    def add_subclass(self, tensor: torch.Tensor, name: str, per_rank: bool) -> Json:
        """Adds a tensor of a subclass that stands by itself. Returns what a tree has in its place."""
        inner = self.take_apart(tensor, name, per_rank)
        for part in inner:
            self.add_tensor(*part)
        return self.flat.objects.get(name, "tensor")

    def parts(self, tensor: torch.Tensor, name: str, per_rank: bool) -> list[Part]:
        return self.take_apart(tensor, name, per_rank) if is_subclass(tensor) else [Part(tensor, name, per_rank)]

    def take_apart(self, tensor: torch.Tensor, name: str, per_rank: bool) -> list[Part]:
        """Returns what a tensor is made of, for `add_tensor`. Asks its kind at each pass: a class may change it at any
        time."""
        self._claim(name)
        self.findings.joined().param_names.setdefault(id(tensor), name)
        if per_rank:
            self.findings.joined().own.add(id(tensor))
        if is_elsewhere(tensor):
            return []
        found = apart(tensor, name)
        self.flat.objects[name] = found.tree
        owner = self.owners.get(id(tensor))
        if owner is not None:
            self.owners |= {id(inner): owner for _, inner in found.tensors}
        self._inner += [inner for _, inner in found.tensors]
        if found.at is not None:
            self.add_value(found.at, place_name(name))
        return [Part(inner, f"{name}/{below}", per_rank or found.at is not None) for below, inner in found.tensors]

    def _leaf(self, tensor: torch.Tensor | Sharded, name: str, per_rank: bool, tied: str | None) -> Leaf | None:
        owner = self.owners.get(id(local_of(tensor)))
        at = place(local_of(tensor))
        known = self._memo.leaves.get(name)
        if known is not None and known.tensor is tensor and known.at == at:
            leaf = known.leaf
            if leaf.owner is owner and leaf.tied == tied and isinstance(leaf.held, OwnPerRank) == per_rank:
                return leaf
        made = leaf_of(tensor, name, per_rank, owner)
        if made is None:
            return None
        made = made if tied is None else replace(made, tied=tied)
        if self._is_lent(local_of(tensor), owner):
            self._inner.append(local_of(tensor))
            return replace(made, lent=True)
        self._memo.leaves[name] = KnownLeaf(tensor, at, made)
        return made

    def _is_lent(self, tensor: torch.Tensor, owner: object) -> bool:
        return self._made or (self._lent and owner is None and accelerator.device_of(tensor) is not None)

    def add_made(self, tensor: torch.Tensor, name: str, per_rank: bool) -> None:
        """Adds a tensor that hooks of a module's `state_dict()` made for this pass, and that nobody keeps."""
        self._made = True
        self.add_tensor(tensor, name, per_rank)
        self._made = False

    def add_value(self, value: object, path: str, depth: int = 0) -> None:
        """Adds a plain value. `depth`: how many levels of the object that it is part of are above it."""
        self._claim(path)
        self.flat.values[path] = values.encode(value, path, depth)

    def add_whole(self, nest: object, path: str) -> None:
        """Adds a container of the state itself whole, which is encoded otherwise than the state of an object."""
        self._claim(path)
        self.flat.values[path] = values.encode_nest(nest, path)

    def add_object(self, state: object, path: str, per_rank: bool) -> None:
        """Adds an object's state: a tree to be rebuilt if it holds tensors, else one value."""
        if has_tensor(state):
            self._lent = True
            self.flat.objects[path] = self._tree(state, path, per_rank, 0)
            self._lent = False
        else:
            self.add_value(state, path)

    def _tree(self, node: object, path: str, per_rank: bool, depth: int) -> Json:
        check_depth(node, path)
        if depth > MAX_DEPTH:
            raise too_deep(path)
        if isinstance(node, PerRank):
            return self._tree(node.value, path, True, depth)
        if is_subclass(node):
            tree = self.add_subclass(node, path, per_rank)
            self.flat.objects.pop(path, None)  # it is part of the tree around it
            return tree
        if isinstance(node, (torch.Tensor, Sharded)):
            self.add_tensor(node, path, per_rank)
            return "tensor"
        if not has_tensor(node):
            self.add_value(node, path, depth)
            return "value"
        kind = _TREES.get(type(node))
        if kind is None:
            raise UnsupportedState(
                f"{path}: a {type(node).__module__}.{type(node).__qualname__} that holds tensors would be loaded as "
                "another type; return dict, OrderedDict, list or tuple from state_dict()"
            )
        if isinstance(node, Mapping):
            values.require_spread(node, path)
            pairs: list[Json] = [
                [
                    values.encode(k, path, depth + 1),
                    self._tree(v, join(path, checked_key(k, path)), per_rank, depth + 1),
                ]
                for k, v in node.items()
            ]
            return {kind: pairs}
        assert isinstance(node, (list, tuple))
        items: list[Json] = [self._tree(v, join(path, i), per_rank, depth + 1) for i, v in enumerate(node)]
        return {kind: items}

    def _claim(self, name: str) -> None:
        if self.findings.has(name):
            raise UnsupportedState(f"two entries of the state have the same name {name!r}; rename one of them")
        if not is_unicode(name):
            raise UnsupportedState(f"{name!r} is not valid Unicode, which safetensors needs; rename that entry")
        self.findings.claim(name)


_TREES: dict[type, str] = {dict: "dict", OrderedDict: "odict", list: "list", tuple: "tuple"}


def has_tensor(node: object, depth: int = 0) -> bool:
    """Returns whether a tensor lies anywhere in nested containers; also True for a nesting without end."""
    if type(node) in SCALARS:  # first: the check for a mapping runs Python code
        return False
    if isinstance(node, (torch.Tensor, Sharded, PerRank)) or depth > MAX_DEPTH:
        return True
    if isinstance(node, Mapping):
        return any(has_tensor(v, depth + 1) for v in node.values())
    return isinstance(node, (list, tuple)) and any(has_tensor(v, depth + 1) for v in node)
