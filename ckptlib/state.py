"""The state of a training job as a flat list of named tensors and values, and back.

State is any nesting of dict, list and tuple that holds tensors, plain values, modules, optimizers, generators, and
objects with `state_dict()` and `load_state_dict()`. `flatten` calls each `state_dict()` once, on the caller's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from ckptlib import values
from ckptlib.errors import UnsupportedState
from ckptlib.layout import PerRank as HeldPerRank
from ckptlib.leaf import Leaf, PerRank, Plain, Sharded, identity, join, leaf_of, local_of, place, refuse_tensor
from ckptlib.modules import is_extra_state, named_state
from ckptlib.optimizers import cut_like, group_path, hyper_parameters, names_of_params, refuse_optimizer, state_path
from ckptlib.values import Json

__all__ = ["Flat", "Leaf", "Memo", "PerRank", "Plain", "Sharded", "flatten", "has_tensor", "is_stateful", "join"]


@dataclass
class Flat:
    """A whole state, flattened."""

    leaves: list[Leaf] = field(default_factory=list)
    values: dict[str, Json] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Json] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    """By path."""


Memo = dict[str, tuple[object, object, Leaf]]
"""By name: the tensor, where and what its local data is, and the leaf made of it at the last pass."""


@torch.no_grad()
def flatten(state: object, memo: Memo | None = None) -> Flat:
    """All tensors and values of `state`, on this rank. Reads no tensor's data.

    With the `memo` of an earlier pass, tensors that are still the same objects at the same address give the very same
    leaves, so that a caller can tell by `is` what changed.

    Raises UnsupportedState, naming the path, for what cannot be saved.
    """
    walk = _Walk({} if memo is None else memo)
    walk.visit(state)
    for path, optimizer in walk.flat.optimizers.items():
        walk.add_optimizer(optimizer, path)
    walk.forget_others()
    return walk.flat


class _Walk:
    """One pass over a state."""

    def __init__(self, memo: Memo) -> None:
        self.flat = Flat()
        self._memo = memo
        self.param_names: dict[int, str] = {}
        self.by_hand: dict[int, Sharded] = {}
        """By id of the tensor that each of them holds."""
        self.owners: dict[int, torch.optim.Optimizer] = {}
        self._names: set[str] = set()
        self._seen: dict[object, str] = {}
        self._modules: list[tuple[str, nn.Module, bool]] = []

    def visit(self, state: object) -> None:
        for optimizer in _optimizers_in(state):
            for group in optimizer.param_groups:
                self.owners.update((id(p), optimizer) for p in group["params"])
        self._collect(state, "", per_rank=False)
        for module_path, module, module_per_rank in self._modules:
            self._visit_module(module, module_path, module_per_rank)
        self._modules.clear()

    def _collect(self, node: object, path: str, per_rank: bool) -> None:
        if isinstance(node, PerRank):
            self._collect(node.value, path, per_rank=True)
        elif isinstance(node, (torch.Tensor, Sharded)):
            self.add_tensor(node, path, per_rank)
        elif isinstance(node, nn.Module):
            self._modules.append((path, node, per_rank))
        elif isinstance(node, torch.optim.Optimizer):
            refuse_optimizer(node, path)
            self.flat.optimizers[path] = node
        elif isinstance(node, torch.Generator):
            self.add_tensor(node.get_state(), path, per_rank=True)
        elif isinstance(node, Mapping):
            for key, value in node.items():
                self._collect(value, join(path, key), per_rank)
        elif isinstance(node, (list, tuple)) and type(node) in (list, tuple):
            for i, value in enumerate(node):
                self._collect(value, join(path, i), per_rank)
        elif is_stateful(node):
            refuse_optimizer(node, path)
            self.add_object(node.state_dict(), path, per_rank)  # type: ignore[attr-defined]
        else:
            self.add_value(node, path)

    def _visit_module(self, module: nn.Module, path: str, per_rank: bool) -> None:
        for name, value in named_state(module, path):
            full = f"{path}/{name}" if path else name
            if isinstance(value, torch.Tensor) and not is_extra_state(name):
                self.add_tensor(value, full, per_rank)
            else:
                self.add_object(value, full, per_rank)

    def add_tensor(self, tensor: torch.Tensor | Sharded, name: str, per_rank: bool) -> None:
        self._claim(name)
        known = self._memo.get(name)
        if known is None or known[0] is not tensor:
            refuse_tensor(tensor, name)
        self.param_names.setdefault(id(local_of(tensor)), name)
        if isinstance(tensor, Sharded):
            self.by_hand[id(tensor.tensor)] = tensor
        key = identity(tensor)
        if key is not None and not per_rank:
            first = self._seen.setdefault(key, name)
            if first != name:
                self.flat.aliases[name] = first
                return
        leaf = self._leaf(tensor, name, per_rank)
        if leaf is not None:
            self.flat.leaves.append(leaf)

    def _leaf(self, tensor: torch.Tensor | Sharded, name: str, per_rank: bool) -> Leaf | None:
        owner = self.owners.get(id(local_of(tensor)))
        at = place(tensor)
        known = self._memo.get(name)
        if known is not None and known[0] is tensor and known[1] == at:
            leaf = known[2]
            if leaf.owner is owner and isinstance(leaf.held, HeldPerRank) == per_rank:
                return leaf
        made = leaf_of(tensor, name, per_rank, owner)
        if made is not None:
            self._memo[name] = (tensor, at, made)
        return made

    def add_optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        names = names_of_params(optimizer, self.param_names)
        self.flat.objects[path] = {"optimizer": {"groups": names}}  # type: ignore[dict-item]
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for key in optimizer.state:
            if id(key) not in known:
                raise UnsupportedState(
                    f"{path}: optimizer state is kept under {str(key)[:40]!r}, which is no parameter of its groups"
                )
        for i, group in enumerate(optimizer.param_groups):
            plain: dict[str, object] = {}
            for option, value in hyper_parameters(group):
                if isinstance(value, torch.Tensor):
                    self.add_tensor(value, join(group_path(path, i), option), per_rank=False)
                elif has_tensor(value):  # betas may be tensors
                    self.add_object(value, join(group_path(path, i), option), per_rank=False)
                else:
                    plain[option] = value
            self.add_value(plain, group_path(path, i))
            for name, param in zip(names[i], group["params"], strict=True):
                for entry, content in optimizer.state.get(param, {}).items():
                    if not isinstance(entry, str):
                        raise UnsupportedState(
                            f"{path}/{name}: optimizer state has the key {entry!r}; keys must be text"
                        )
                    cut = cut_like(self.by_hand.get(id(param)), content)
                    self._add_optimizer_entry(state_path(path, name, entry), cut, optimizer)

    def _add_optimizer_entry(self, path: str, value: object, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(value, (torch.Tensor, Sharded)):
            self.owners[id(local_of(value))] = optimizer
            self.add_tensor(value, path, per_rank=False)
        else:
            self.add_object(value, path, per_rank=False)

    def forget_others(self) -> None:
        """Lets go of tensors that the state no longer has."""
        for name in self._memo.keys() - self._names:
            del self._memo[name]

    def add_value(self, value: object, path: str) -> None:
        self._claim(path)
        self.flat.values[path] = values.encode(value, path)

    def add_object(self, state: object, path: str, per_rank: bool) -> None:
        """An object's state: a tree to be rebuilt when it holds tensors, else one value."""
        if has_tensor(state):
            self.flat.objects[path] = self._tree(state, path, per_rank)
        else:
            self.add_value(state, path)

    def _tree(self, node: object, path: str, per_rank: bool) -> Json:
        if isinstance(node, PerRank):
            return self._tree(node.value, path, per_rank=True)
        if isinstance(node, (torch.Tensor, Sharded)):
            self.add_tensor(node, path, per_rank)
            return "tensor"
        if not has_tensor(node):
            self.add_value(node, path)
            return "value"
        kind = _TREES.get(type(node))
        if kind is None:
            raise UnsupportedState(
                f"{path}: a {type(node).__module__}.{type(node).__qualname__} that holds tensors would come back as "
                "something else; let state_dict() give dict, OrderedDict, list or tuple"
            )
        if isinstance(node, Mapping):
            pairs = [[values.encode(k, path), self._tree(v, join(path, k), per_rank)] for k, v in node.items()]
            return {kind: pairs}  # type: ignore[dict-item]
        return {kind: [self._tree(v, join(path, i), per_rank) for i, v in enumerate(node)]}  # type: ignore[arg-type, var-annotated]

    def _claim(self, name: str) -> None:
        if name in self._names:
            raise UnsupportedState(f"two entries of the state are both called {name!r}; rename one of them")
        self._names.add(name)


_TREES: dict[type, str] = {dict: "dict", OrderedDict: "odict", list: "list", tuple: "tuple"}


def _optimizers_in(node: object) -> Iterator[torch.optim.Optimizer]:
    """Before any tensor is looked at, since a tensor may stand before its owner."""
    if isinstance(node, PerRank):
        yield from _optimizers_in(node.value)
    elif isinstance(node, torch.optim.Optimizer):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _optimizers_in(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _optimizers_in(value)


def is_stateful(node: object) -> bool:
    """Whether an object gives and takes its state."""
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


def has_tensor(node: object) -> bool:
    """Whether a tensor lies anywhere in a nesting of containers."""
    if isinstance(node, (torch.Tensor, Sharded, PerRank)):
        return True
    if isinstance(node, Mapping):
        return any(has_tensor(v) for v in node.values())
    return isinstance(node, (list, tuple)) and any(has_tensor(v) for v in node)
