"""The state of a training job as a flat list of named tensors and values, and back.

State is any nesting of dict, list and tuple that holds tensors, plain values, modules, optimizers, generators, and
objects with `state_dict()` and `load_state_dict()`. `flatten` calls each `state_dict()` once, on the caller's thread,
but that of a module which would give what it gave before: see `ckptlib.state.structure`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from typing_extensions import override

from ckptlib.devices import accelerator
from ckptlib.errors import UnsupportedState
from ckptlib.format import values
from ckptlib.format.layout import OwnPerRank
from ckptlib.format.tagged_values import MAX_DEPTH, is_unicode
from ckptlib.format.values import Json
from ckptlib.state.entries import Entries, entries_of
from ckptlib.state.leaf import (
    PLAIN,
    Leaf,
    PerRank,
    Sharded,
    identity,
    identity_of_plain,
    is_elsewhere,
    join,
    leaf_of,
    leaf_of_plain,
    local_of,
    place,
    place_of_plain,
    refuse_tensor,
)
from ckptlib.state.memo import Fingerprint, Found, KnownLeaf, KnownModule, KnownOptimizer, Memo, Section
from ckptlib.state.modules import is_extra_state, named_state
from ckptlib.state.optimizers import (
    cut_like,
    group_path,
    hyper_parameters,
    names_of_params,
    refuse_strangers,
    state_path,
    warn_of_positions,
)
from ckptlib.state.owners import owned_in, owners_of
from ckptlib.state.structure import same, structure_of
from ckptlib.state.subclasses import any_subclass, apart, is_subclass, place_name
from ckptlib.state.visitor import Visitor, check_depth, too_deep


@dataclass
class Flat:
    """A whole state, flattened."""

    leaves: list[Leaf] = field(default_factory=list)
    values: dict[str, Json] = field(default_factory=dict)
    objects: dict[str, Json] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    """By path."""

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied tensors, each with the first one."""
        return {leaf.name: leaf.tied for leaf in self.leaves if leaf.tied is not None}


@torch.no_grad()
def flatten(state: object, memo: Memo | None = None) -> Flat:
    """All tensors and values of `state`, on this rank. Reads no tensor's data.

    With the `memo` of an earlier pass, tensors that are still the same objects at the same address give the very same
    leaves, so that a caller can tell by `is` what changed.

    Raises UnsupportedState, naming the path, for what cannot be saved.
    """
    memo = Memo() if memo is None else memo
    owned = owned_in(state)
    if not same(owned, memo.owned):
        memo.owned, memo.owners = owned, owners_of(owned)
        memo.sections.clear()
    walk = _Walk(memo, dict(memo.owners))
    walk.visit(state, False)
    if not memo.leaves.keys() <= walk.found.names.keys():
        for name in memo.leaves.keys() - walk.found.names.keys():  # what the state no longer has
            del memo.leaves[name]
    known: dict[tuple[str, bool], Any]
    for known in (memo.sections, memo.modules, memo.optimizers):
        for key in known.keys() - walk.sections:
            del known[key]
    return walk.flat


SECTION_FROM = 16
"""So many tensors in a dict are asked about together."""


class _Part(NamedTuple):
    """What `add_tensor` takes: an ordinary tensor, or one of those that a tensor of a subclass is made of."""

    tensor: torch.Tensor
    name: str
    per_rank: bool


class _Walk(Visitor[bool]):
    """One pass over a state, or over a section of it. Hands down whether every rank has its own."""

    def __init__(self, memo: Memo, owners: dict[int, torch.optim.Optimizer]) -> None:
        """`owners`: by id of tensor."""
        super().__init__()
        self.found = Found()
        self.flat = Flat(self.found.leaves)
        self.owners = owners
        self.by_hand: dict[int, Sharded] = {}
        """By id of the tensor that each of them holds."""
        self.sections: set[tuple[str, bool]] = set()
        self._inner: list[torch.Tensor] = []
        """Of subclasses: kept, so that no other tensor of this pass can have the id of one."""
        self._lent = False
        """Whether what comes next was given by a `state_dict()`, which may have made it for us."""
        self._memo = memo

    @override
    def below_per_rank(self, per_rank: bool) -> bool:
        return True

    @override
    def below(self, container: object, per_rank: bool) -> Callable[[object], bool]:
        return lambda key: per_rank

    @override
    def add_entries(self, node: Mapping[object, object], path: str, per_rank: bool) -> bool:
        if len(node) < SECTION_FROM or {*map(type, node.values())} - {*PLAIN} or {*map(type, node)} != {str}:
            return False
        keys, tensors = list(node), cast(list[torch.Tensor], list(node.values()))

        def add(walk: _Walk) -> None:
            for key, tensor in zip(keys, tensors, strict=True):
                walk.add_tensor(tensor, join(path, key), per_rank)

        self._add_section((path, per_rank), Fingerprint(keys, (), tensors), add)
        return True

    @override
    def add_any_tensor(self, tensor: torch.Tensor | Sharded, path: str, per_rank: bool) -> None:
        if is_subclass(tensor):
            self._add_subclass(tensor, path, per_rank)
        else:
            self.add_tensor(tensor, path, per_rank)

    @override
    def add_generator(self, generator: torch.Generator, path: str) -> None:
        self.add_tensor(generator.get_state(), path, per_rank=True)

    @override
    def add_stateful(self, node: Any, path: str, per_rank: bool) -> None:
        self.add_object(node.state_dict(), path, per_rank)

    @override
    def add_plain(self, value: object, path: str, per_rank: bool) -> None:
        self.add_value(value, path)

    @override
    def add_module(self, module: nn.Module, path: str, per_rank: bool) -> None:
        key = path, per_rank
        known = self._memo.modules.get(key)
        if known is not None and known.structure.stands(module) and self._stays(key, known.sight):
            self._take(key, _adding(known.sight))
            return
        self._memo.modules.pop(key, None)
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        others: list[tuple[str, object]] = []
        for name, value in named_state(module, path):
            full = f"{path}/{name}" if path else name
            if isinstance(value, torch.Tensor) and not is_extra_state(name):
                names.append(full)
                tensors.append(value)
            else:
                others.append((full, value))
        own = [per_rank] * len(names)
        is_made_of_others = any_subclass(tensors)
        if is_made_of_others:
            parts = list(chain.from_iterable(self._parts(t, n, per_rank) for t, n in zip(tensors, names, strict=True)))
            tensors, names, own = [p.tensor for p in parts], [p.name for p in parts], [p.per_rank for p in parts]
        sight = Fingerprint([names, own], (), tensors)
        if self._add_section(key, sight, _adding(sight)) and not is_made_of_others and not others:
            structure = structure_of(module)
            if structure is not None:
                self._memo.modules[key] = KnownModule(structure, self._memo.sections[key].sight)
        for name, value in others:
            self.add_object(value, name, per_rank)

    def _add_section(self, key: tuple[str, bool], sight: Fingerprint, add: Callable[[_Walk], None]) -> bool:
        """What `add` finds, or what it found at the last pass. Returns whether it is that.

        It is given a walk of its own, so that what it finds can be kept, unless that has something in common with what
        was found before it.
        """
        known = self._memo.sections.get(key)
        is_known = known is not None and known.shows(sight)
        if not is_known:
            alone = _Walk(self._memo, self.owners)
            add(alone)
            self._memo.sections[key] = Section(sight, alone.found)
        self._take(key, add)
        return is_known

    def _stays(self, key: tuple[str, bool], sight: Fingerprint) -> bool:
        """Whether a section is the one that was made at this sight, and its tensors lie where they lay."""
        known = self._memo.sections.get(key)
        return known is not None and known.sight is sight and known.shows(sight)

    def _take(self, key: tuple[str, bool], add: Callable[[_Walk], None]) -> None:
        self.sections.add(key)
        made = self._memo.sections[key].made
        if self.found.is_apart_from(made):
            self.found.take(made)
        else:  # ties, or names that stand twice
            add(self)

    def add_tensor(self, tensor: torch.Tensor | Sharded, name: str, per_rank: bool) -> None:
        if type(tensor) in PLAIN:
            self._add_plain_tensor(tensor, name, per_rank)  # type: ignore[arg-type]
            return
        self._claim(name)
        known = self._memo.leaves.get(name)
        if known is None or known.tensor is not tensor:
            refuse_tensor(tensor, name)
        self.found.param_names.setdefault(id(local_of(tensor)), name)
        if isinstance(tensor, Sharded):
            self.by_hand[id(tensor.tensor)] = tensor
        key = None if per_rank else identity(tensor)
        leaf = self._leaf(tensor, name, per_rank, self.found.seen.get(key))
        if leaf is None:
            return  # outside of its mesh: no name of it is one here, and it may be gone before another gets its id
        if key is not None:
            self.found.seen.setdefault(key, name)
        self.found.leaves.append(leaf)

    def _add_plain_tensor(self, tensor: torch.Tensor, name: str, per_rank: bool) -> None:
        """As `add_tensor`, with each question asked once: nearly all tensors are such, and there may be thousands."""
        self._claim(name)
        known = self._memo.leaves.get(name)
        if known is None or known.tensor is not tensor:
            refuse_tensor(tensor, name)
        found, number = self.found, id(tensor)
        found.param_names.setdefault(number, name)
        at = place_of_plain(tensor)
        tied: str | None = None
        if not per_rank and (key := identity_of_plain(tensor, at)) is not None:
            first = found.seen.setdefault(key, name)
            tied = None if first is name else first
        owner = self.owners.get(number)
        if known is not None and known.tensor is tensor and known.at == at:
            leaf = known.leaf
            if leaf.owner is owner and leaf.tied == tied and isinstance(leaf.held, OwnPerRank) == per_rank:
                found.leaves.append(leaf)
                return
        made = leaf_of_plain(tensor, name, per_rank, owner, tied)
        if self._lent and owner is None and accelerator.device_of(tensor) is not None:
            made = replace(made, lent=True)
        else:
            self._memo.leaves[name] = KnownLeaf(tensor, at, made)
        found.leaves.append(made)

    def _add_subclass(self, tensor: torch.Tensor, name: str, per_rank: bool) -> Json:
        """A tensor that is made of others, where it stands by itself. Gives what a tree has in its place."""
        inner = self._apart(tensor, name, per_rank)
        for part in inner:
            self.add_tensor(*part)
        return self.flat.objects.get(name, "tensor")

    def _parts(self, tensor: torch.Tensor, name: str, per_rank: bool) -> list[_Part]:
        return self._apart(tensor, name, per_rank) if is_subclass(tensor) else [_Part(tensor, name, per_rank)]

    def _apart(self, tensor: torch.Tensor, name: str, per_rank: bool) -> list[_Part]:
        """What it is made of, for `add_tensor`. Its kind is asked at each pass: a class may change it at any time."""
        self._claim(name)
        self.found.param_names.setdefault(id(tensor), name)
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
        return [_Part(inner, f"{name}/{below}", per_rank or found.at is not None) for below, inner in found.tensors]

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
        if self._lent and owner is None and accelerator.device_of(local_of(tensor)) is not None:
            return replace(made, lent=True)
        self._memo.leaves[name] = KnownLeaf(tensor, at, made)
        return made

    @override
    def add_optimizer(self, optimizer: torch.optim.Optimizer, path: str, per_rank: bool) -> None:
        self.flat.optimizers[path] = optimizer
        key, entries = (path, per_rank), entries_of(optimizer)
        known = self._memo.optimizers.pop(key, None)
        if known is not None and not (self._stands(known, entries) and self._stays(key, known.sight)):
            known = None
        described: dict[str, Json]
        if known is not None:
            names, described = known.names, known.described
        else:
            names = names_of_params(optimizer, self.found.param_names)
            warn_of_positions(optimizer, names, path, "saved")
            params = [param for group in optimizer.param_groups for param in group["params"]]
            refuse_strangers(optimizer, params, path)
            described = {"optimizer": _describe(optimizer, names)}
        self.flat.objects[path] = cast(Json, described)
        for i, group in enumerate(optimizer.param_groups):
            self._add_hyper_parameters(group, group_path(path, i), per_rank)

        def content() -> Iterator[tuple[str, torch.Tensor, object]]:
            params = (param for group in optimizer.param_groups for param in group["params"])
            for name, param in zip(chain.from_iterable(names), params, strict=True):
                for key, value in optimizer.state.get(param, {}).items():
                    yield state_path(path, name, key), param, value

        taken: dict[str, list[_Part]] = {}
        """By name: what the tensors are made of that are made of others."""

        def add(walk: _Walk) -> None:
            for name, param, value in content():
                if name in taken:
                    for part in taken[name]:
                        walk.owners[id(part.tensor)] = optimizer
                        walk.add_tensor(*part)
                elif isinstance(value, torch.Tensor):
                    walk.owners[id(value)] = optimizer
                    walk.add_tensor(cut_like(self.by_hand.get(id(param)), value), name, per_rank)

        if known is not None:
            self._memo.optimizers[key] = known
            self._take(key, add)
            return
        held = optimizer.state.values()
        contents = [value for entry in held for value in entry.values()]
        tensors = [value for value in contents if isinstance(value, torch.Tensor)]
        mixed = len(tensors) < len(contents)
        if mixed:
            keys = [[key for key, value in entry.items() if isinstance(value, torch.Tensor)] for entry in held]
        else:
            keys = list(map(list, held))
        if any_subclass(tensors):
            for name, param, value in content():
                if is_subclass(value) and is_subclass(cut_like(self.by_hand.get(id(param)), value)):
                    taken[name] = self._apart(value, name, per_rank)
            inner = list(chain.from_iterable(taken.values()))
            tensors = [*(t for t in tensors if not is_subclass(t)), *(part.tensor for part in inner)]
            keys.append([(part.name, part.per_rank) for part in inner])
        if self.by_hand:
            add(self)
        elif self._add_section(key, Fingerprint([names, keys], [*params, *optimizer.state], tensors), add):
            is_named = None not in map(self.found.param_names.get, map(id, params))
            if entries is not None and is_named and not mixed and not taken:
                sight = self._memo.sections[key].sight
                self._memo.optimizers[key] = KnownOptimizer(entries, sight, names, described)
        if mixed:
            for name, _, value in content():
                if not isinstance(value, torch.Tensor):
                    self.add_object(value, name, per_rank)

    def _stands(self, known: KnownOptimizer, entries: Entries | None) -> bool:
        """Whether the names and tensors of an optimizer are as they were."""
        return (
            entries is not None
            and not self.by_hand
            and known.entries.shows(entries)
            and list(map(self.found.param_names.get, map(id, entries.params))) == [*chain.from_iterable(known.names)]
        )

    def _add_hyper_parameters(self, group: Mapping[str, object], path: str, per_rank: bool) -> None:
        plain: dict[str, object] = {}
        for option, value in hyper_parameters(group):
            if isinstance(value, torch.Tensor):
                self.add_tensor(value, join(path, option), per_rank)
            elif has_tensor(value):  # betas may be tensors
                self.add_object(value, join(path, option), per_rank)
            else:
                plain[option] = value
        self.add_value(plain, path)

    def add_value(self, value: object, path: str, depth: int = 0) -> None:
        """`depth`: levels of the object that it is part of, above it."""
        self._claim(path)
        self.flat.values[path] = values.encode(value, path, depth)

    def add_object(self, state: object, path: str, per_rank: bool) -> None:
        """An object's state: a tree to be rebuilt when it holds tensors, else one value."""
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
            tree = self._add_subclass(node, path, per_rank)
            self.flat.objects.pop(path, None)  # it stands in the tree around it
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
            pairs = [
                [values.encode(k, path, depth + 1), self._tree(v, join(path, k), per_rank, depth + 1)]
                for k, v in node.items()
            ]
            return {kind: pairs}  # type: ignore[dict-item]
        items: list[Json] = [self._tree(v, join(path, i), per_rank, depth + 1) for i, v in enumerate(node)]  # type: ignore[arg-type, var-annotated]
        return {kind: items}

    def _claim(self, name: str) -> None:
        if name in self.found.names:
            raise UnsupportedState(f"two entries of the state have the same name {name!r}; rename one of them")
        if not is_unicode(name):
            raise UnsupportedState(f"{name!r} is not valid Unicode, which safetensors needs; rename that entry")
        self.found.names[name] = None


def _adding(sight: Fingerprint) -> Callable[[_Walk], None]:
    """Adds the tensors of a module."""
    names, own = cast(Sequence[Sequence[Any]], sight.names)

    def add(walk: _Walk) -> None:
        for part in zip(sight.tensors, names, own, strict=True):
            walk.add_tensor(*part)

    return add


def _describe(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> Json:
    """What a layout tells of an optimizer. Of ranks that hold the same it tells the same."""
    orders = sorted(map(list, {*map(tuple, optimizer.state.values())}), key=str)
    return {"groups": names, "class": type(optimizer).__name__, "keys": orders}  # type: ignore[dict-item]


_TREES: dict[type, str] = {dict: "dict", OrderedDict: "odict", list: "list", tuple: "tuple"}


def has_tensor(node: object, depth: int = 0) -> bool:
    """Whether a tensor lies anywhere in a nesting of containers; also said of one that has no end."""
    if isinstance(node, (torch.Tensor, Sharded, PerRank)) or depth > MAX_DEPTH:
        return True
    if isinstance(node, Mapping):
        return any(has_tensor(v, depth + 1) for v in node.values())
    return isinstance(node, (list, tuple)) and any(has_tensor(v, depth + 1) for v in node)
