"""Records this process's loads and the states that they filled, so that a save is known to go on from an older step.

A state is recognised by its parts: its modules, its optimizers, its other objects, the memory of its tensors. The
record keeps none of them alive. Plain values do not identify a state.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ckptlib.format import gc_pause
from ckptlib.format.keys import SaveId
from ckptlib.state.frameworks import keeps_no_state
from ckptlib.state.leaf import PerRank, Sharded, is_lazy
from ckptlib.state.places import own_part
from ckptlib.state.visitor import is_stateful


class Parts:
    """The parts of a state. Keeps them alive, so it must not be stored."""

    def __init__(self, state: object, *, ask: bool) -> None:
        """`ask`: call each `state_dict()`, so that objects made for one save or load are recognised by their tensors.

        That may be collective, or begin something: do not ask on one rank alone, nor in a load.
        """
        found: list[object] = []
        _collect(state, found)
        self.objects = [part for part in found if not isinstance(part, torch.Tensor)]
        """Modules, optimizers, other objects with a state."""
        self.tensors = [_tensors_of(part, ask) for part in self.objects]
        """The tensors by which each of the objects is recognised even if a new object wraps them."""
        self.loose = [part for part in found if isinstance(part, torch.Tensor)]
        """Tensors that are in none of the objects."""


def _tensors_of(part: object, ask: bool) -> list[torch.Tensor]:
    if isinstance(part, nn.Module):  # may have been wrapped since; buffers do not count, as some modules make them anew
        return [param for param in part.parameters() if not is_lazy(param)]
    if isinstance(part, torch.optim.Optimizer) or not ask:  # parameters may have been filled without the optimizer
        return []
    if keeps_no_state(part):  # the save itself refuses it, by its name
        return []
    found: list[object] = []
    _collect(part.state_dict(), found)  # type: ignore[attr-defined]
    return [inner for inner in found if isinstance(inner, torch.Tensor)]


class Filled:
    """The parts that a load has filled, recognised as long as they live."""

    def __init__(self, parts: Parts, read_into: Iterable[torch.Tensor] = ()) -> None:
        """`read_into`: the memory that the load has filled, which modules and other objects have as their own since."""
        self._storages: dict[int, StorageWeakRef] = {}
        """By address of the storage itself, which is not reused as long as somebody refers to it, even weakly."""
        tensors = {id(tensor): tensor for tensor in chain(read_into, parts.loose, *parts.tensors)}
        for tensor in tensors.values():  # most occur twice
            storage = own_part(tensor).untyped_storage()
            if storage._cdata not in self._storages:  # making a reference takes Python code
                self._storages[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # as torch has it
        self._objects = {id(part): weakref.ref(part) for part in parts.objects if type(part).__weakrefoffset__}

    def all_of(self, parts: Parts) -> bool | None:
        """Returns whether everything that identifies a state was filled; None if nothing does: plain values do not.

        Loose tensors count only if there is nothing else, and then most of them must be filled: a loss and the state of
        a random generator are made anew for each save.
        """
        has = map(self._has, parts.objects, parts.tensors)
        told = [one for one in has if one is not None]
        return all(told) if told else self._has_most(parts.loose)

    def some_of(self, parts: Parts) -> bool:
        """Returns whether anything of a state was filled."""
        return any(map(self._is, parts.objects)) or any(map(self._has_storage, chain(parts.loose, *parts.tensors)))

    def _has(self, part: object, tensors: list[torch.Tensor]) -> bool | None:
        if self._is(part):
            return True
        if isinstance(part, torch.optim.Optimizer):
            return False
        if isinstance(part, nn.Module):
            return all(map(self._has_storage, tensors)) if tensors else None
        return self._has_most(tensors)

    def _is(self, part: object) -> bool:
        known = self._objects.get(id(part))
        return known is not None and known() is part

    def _has_most(self, tensors: Iterable[torch.Tensor]) -> bool | None:
        local = [own_part(tensor) for tensor in tensors]
        total = sum(tensor.nbytes for tensor in local)
        return 2 * sum(tensor.nbytes for tensor in local if self._has_storage(tensor)) > total if total else None

    def _has_storage(self, tensor: torch.Tensor) -> bool:
        return own_part(tensor).untyped_storage()._cdata in self._storages

    def within(self, other: Filled) -> bool:
        """Returns whether the other has every part of this that is still alive: a loss is made anew for each load."""
        return not self._any_alive(
            self._objects.keys() - other._objects.keys(), self._storages.keys() - other._storages.keys()
        )

    @property
    def alive(self) -> bool:
        """Whether any of the parts is still alive."""
        return self._any_alive(self._objects, self._storages)

    def _any_alive(self, objects: Iterable[int], storages: Iterable[int]) -> bool:
        there = any(self._objects[known]() is not None for known in objects)
        return there or not all(self._storages[known].expired() for known in storages)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Load:
    """One load."""

    save: SaveId
    filled: Filled
    whole: bool
    """Whether it filled all of the state that it was given."""

    def replaces(self, older: Load) -> bool:
        """Returns whether `older` is no longer needed. A load of a part does not replace a whole load before it."""
        return (self.whole or not older.whole) and older.filled.within(self.filled)


class Loads:
    """The loads of one root since the last save to it. Its ranks load together, but each knows only its own state."""

    def __init__(self) -> None:
        self._saves: set[SaveId] = set()
        self._loads: list[Load] = []
        """Of loads into the same state, only the last one."""

    def add(self, save: SaveId, state: object, read_into: Iterable[torch.Tensor], *, whole: bool) -> None:
        with gc_pause.kept():  # a reference per tensor: every other load of 20,000 ran a full collection
            filled = Filled(Parts(state, ask=False), read_into)
        load = Load(save, filled, whole)
        self._loads = [*(old for old in self._loads if old.filled.alive and not load.replaces(old)), load]
        self._saves.add(save)

    def into(self, parts: Parts) -> SaveId | None:
        """Returns the step that was loaded last into all of a state, or None."""
        return next((load.save for load in reversed(self._loads) if load.whole and load.filled.all_of(parts)), None)

    def into_some_of(self, parts: Parts) -> SaveId | None:
        """Returns the step that was loaded last into some of a state, or None."""
        return next((load.save for load in reversed(self._loads) if load.filled.some_of(parts)), None)

    def before(self, step: int) -> SaveId | None:
        """Returns the newest loaded step before `step`, whatever it was loaded into, or None."""
        return max((save for save in self._saves if save.step < step), default=None)


def tells(parts: Parts) -> bool:
    """Returns whether a state can be recognised."""
    return Filled(Parts((), ask=False)).all_of(parts) is not None


def _collect(node: object, found: list[object]) -> None:
    """Appends the parts that `ckptlib.state.visitor` meets."""
    if isinstance(node, torch.Tensor):  # first: there may be thousands
        if node.layout == torch.strided and not is_lazy(node):  # no other can be saved
            found.append(node)
    elif isinstance(node, (PerRank, Sharded)):
        _collect(node.value if isinstance(node, PerRank) else node.tensor, found)
    elif isinstance(node, Mapping):
        for value in node.values():
            _collect(value, found)
    elif isinstance(node, (list, tuple)):
        for value in node:
            _collect(value, found)
    elif isinstance(node, (nn.Module, torch.optim.Optimizer)) or is_stateful(node):
        found.append(node)
