"""The kinds of things that a state is made of, each with the one method that a walk over a state has for it.

Saving and loading both walk a state by a `Visitor`, so they agree on what is what, and on every name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from ckptlib.errors import UnsupportedState
from ckptlib.format.paths import join
from ckptlib.format.tagged_values import MAX_DEPTH
from ckptlib.state.frameworks import AcceleratedLoader, is_tensor_dict, refuse_loader, torch_optimizer, unwrapped
from ckptlib.state.hidden_state import refuse_hidden
from ckptlib.state.leaf import PerRank, Sharded
from ckptlib.state.optimizers import refuse_optimizer
from ckptlib.state.own_generators import GENERATORS, OwnGenerator

Given = TypeVar("Given")
"""The context that a walk hands down from a container to its entries."""


class Visitor(ABC, Generic[Given]):
    """A walk over a state: one method for each kind of thing, which is given its path.

    Modules come after everything beside them, and optimizers after the modules, which name their parameters. Raises
    UnsupportedState for optimizers and data loaders that cannot be saved, and for a nesting without end.
    """

    def __init__(self) -> None:
        self._modules: list[tuple[nn.Module, str, Given]] = []
        self._optimizers: list[tuple[torch.optim.Optimizer, str, Given]] = []
        self._known: set[int] = set()
        """The ids of these optimizers."""

    def visit(self, state: object, given: Given) -> None:
        self._collect(state, "", given)
        for module in self._modules:
            self.add_module(*module)
        for optimizer in self._optimizers:
            self.add_optimizer(*optimizer)

    def _collect(self, node: object, path: str, given: Given) -> None:
        if type(node) in SCALARS:  # these first: there may be thousands
            self.add_plain(node, path, given)
            return
        if isinstance(node, (torch.Tensor, Sharded)):  # and these
            self.add_any_tensor(node, path, given)
            return
        check_depth(node, path)
        if isinstance(node, PerRank):
            self._collect(node.value, path, self.below_per_rank(given))
        elif isinstance(node, nn.Module):
            self._modules.append((node, path, given))
        elif isinstance(node, torch.optim.Optimizer):
            refuse_optimizer(unwrapped(node), path)
            optimizer = torch_optimizer(node, path)
            self._known.add(id(optimizer))
            self._optimizers.append((optimizer, path, given))
        elif isinstance(node, torch.Generator):
            self.add_generator(node, path)
        elif isinstance(node, Mapping):
            if self.add_entries(node, path, given) or (path and self.add_nest(node, path, given)):
                return
            entry = self.below(node, given)
            for key, value in node.items():
                self._collect(value, join(path, checked_key(key, path)), entry(key))
        elif type(node) in (list, tuple):
            if path and self.add_nest(node, path, given):
                return
            entry = self.below(node, given)
            for i, value in enumerate(self.entries(node, path)):  # type: ignore[arg-type]
                self._collect(value, join(path, i), entry(i))
        elif type(node) in GENERATORS:
            self.add_stateful(OwnGenerator(node, path), path, given)  # type: ignore[arg-type]
        elif is_stateful(node):
            refuse_optimizer(node, path)
            refuse_loader(node, path)
            self.add_stateful(AcceleratedLoader(node, path) if AcceleratedLoader.of(node) else node, path, given)
        else:
            refuse_loader(node, path)
            self.add_plain(node, path, given)

    def refuse_hidden(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        """Raises UnsupportedState for state of an optimizer that is in none of the state's optimizers."""
        refuse_hidden(optimizer, path, self._known)

    def entries(self, node: Sequence[object], path: str) -> Sequence[object]:
        """Returns the entries of a list or tuple that are walked."""
        return node

    @abstractmethod
    def below_per_rank(self, given: Given) -> Given:
        """Returns the context inside a PerRank."""

    @abstractmethod
    def below(self, container: object, given: Given) -> Callable[[object], Given]:
        """Returns a function from the key or index of an entry to its context."""

    def add_entries(self, node: Mapping[object, object], path: str, given: Given) -> bool:
        """May add all entries of a mapping at once. Returns whether it did; else they are visited one by one."""
        return False

    @abstractmethod
    def add_nest(self, node: object, path: str, given: Given) -> bool:
        """May take a container below the top as one value. Returns whether it did; else its entries are visited."""

    @abstractmethod
    def add_any_tensor(self, tensor: torch.Tensor | Sharded, path: str, given: Given) -> None:
        """Adds a tensor that stands by itself: of a subclass, a DTensor, one that was cut by hand, or an ordinary
        one."""

    @abstractmethod
    def add_module(self, module: nn.Module, path: str, given: Given) -> None: ...

    @abstractmethod
    def add_optimizer(self, optimizer: torch.optim.Optimizer, path: str, given: Given) -> None:
        """Adds an optimizer of torch, without its wrappers."""

    @abstractmethod
    def add_generator(self, generator: torch.Generator, path: str) -> None: ...

    @abstractmethod
    def add_stateful(self, node: Any, path: str, given: Given) -> None:
        """Adds any other object with `state_dict()` and `load_state_dict()`, and a generator that is not torch's."""

    @abstractmethod
    def add_plain(self, value: object, path: str, given: Given) -> None:
        """Adds anything else: a plain value, or something that cannot be saved."""


def checked_key(key: object, path: str) -> object:
    """Returns a dict's key. Raises UnsupportedState if another process would give it another text: no load would find
    that name."""
    if type(key) is str:  # nearly all
        return key
    if isinstance(key, (torch.Tensor, nn.Module)) or f"0x{id(key):x}" in str(key) or _is_in_any_order(key):
        raise UnsupportedState(
            f"{path}: a dict has a {type(key).__module__}.{type(key).__qualname__} as a key, by which a restarted job "
            "would not find its entry; use names as keys, such as, where each parameter has its own optimizer, "
            "{name: optimizers[p] for name, p in model.named_parameters()}"
        )
    return key


def _is_in_any_order(key: object) -> bool:
    """Returns whether a key has a set in it whose text is another one in each process, as that of a set of texts is."""
    if not isinstance(key, (tuple, frozenset)):
        return False
    has_order = isinstance(key, tuple) or len(key) < 2 or all(map(_is_hashed_alike, key))
    return not has_order or any(map(_is_in_any_order, key))


def _is_hashed_alike(item: object) -> bool:
    """Returns whether each process has the same hash of an item, as of numbers; the hash gives it its place in a
    set."""
    return all(map(_is_hashed_alike, item)) if isinstance(item, (tuple, frozenset)) else isinstance(item, Number)


SCALARS = frozenset([int, float, str, bool, type(None)])
"""The types of the commonest plain values."""


def are_scalars(nodes: Iterable[object]) -> bool:
    """Returns whether all are plain values of the commonest types. Quick: a history may have a million of them."""
    return SCALARS.issuperset(map(type, nodes))


def is_plain(node: object) -> bool:
    """Returns whether a value is neither walked nor asked for its state."""
    kinds = (torch.Tensor, Sharded, PerRank, nn.Module, torch.optim.Optimizer, torch.Generator, Mapping, list, tuple)
    return not isinstance(node, kinds) and type(node) not in GENERATORS and not is_stateful(node)


def is_stateful(node: object) -> bool:
    """Returns whether an object gives and takes its state."""
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


def has_own_state(node: object) -> bool:
    """Returns whether a dict is of a class that gives and takes its state. The class is asked: some dicts make an entry
    of whatever they are asked for."""
    return type(node) is not dict and is_stateful(type(node)) and not is_tensor_dict(node)


def check_depth(node: object, path: str) -> None:
    """Raises UnsupportedState for a state that is nested without end."""
    if path.count("/") > MAX_DEPTH and isinstance(node, (Mapping, list, tuple)):
        raise too_deep(path)


def too_deep(path: str) -> UnsupportedState:
    return UnsupportedState(f"{path[:80]}...: nested deeper than {MAX_DEPTH} levels; does it contain itself?")
