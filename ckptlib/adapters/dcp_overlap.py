"""Lets `async_save` copy tensors beside the training: those of optimizers whose next step waits for the copy.

A state dict of DCP has tensors and names, and no optimizer. An optimizer's tensors are recognised by their memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ckptlib.errors import TornSnapshot
from ckptlib.saving.pending import Pending
from ckptlib.staging.fence import Fence
from ckptlib.state.leaf import Leaf, Sharded, local_of
from ckptlib.state.owners import is_left_alone
from ckptlib.state.places import place
from ckptlib.state.subclasses import is_subclass

log = logging.getLogger(__name__)


class _Fenced:
    """The record of one optimizer. Its hook stays, as the optimizer may be given again at any save."""

    def __init__(self) -> None:
        self.fence = Fence()
        self.last: Pending | None = None
        """The last save that was begun."""
        self.torn = False
        """Whether something else was seen to write to its tensors during a copy: then they no longer overlap."""

    def may_overlap(self, optimizer: Optimizer) -> bool:
        if self.last is not None and isinstance(self.last.staging.error, TornSnapshot) and not self.torn:
            self.torn = True
            log.warning("%s: from now on async_save copies all before it returns", self.last.staging.error)
        return self.fence.fired(optimizer) and not self.torn


_known: MutableMapping[Optimizer, _Fenced] = WeakIdKeyDictionary()
"""Keyed by identity, as everywhere: an optimizer may define `==`, and have no hash."""


class Overlapping:
    """The optimizers given to one save."""

    def __init__(self, optimizers: Optimizer | Iterable[Optimizer] | None) -> None:
        """Raises TypeError for an argument that is no optimizer."""
        given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
        for optimizer in given:
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"overlap={optimizer!r}: give the torch.optim.Optimizer whose step writes the tensors")
        self._optimizers = [*{id(optimizer): optimizer for optimizer in given}.values()]
        self._fenced = [_known.setdefault(optimizer, _Fenced()) for optimizer in self._optimizers]
        self._overlap: dict[int, bool] = {}
        """Whether each optimizer may overlap, by its id."""
        for optimizer, fenced in zip(self._optimizers, self._fenced, strict=True):
            fenced.fence.install([optimizer])
            self._overlap[id(optimizer)] = fenced.may_overlap(optimizer)

    def owners(self, states: Mapping[str, object]) -> dict[int, Optimizer]:
        """Returns the optimizer that owns each tensor's memory as parameter or state, by id of the tensor."""
        by_memory = {_memory(tensor): optimizer for optimizer in self._optimizers for tensor in _tensors_of(optimizer)}
        if not by_memory:
            return {}
        found = ((id(tensor), by_memory.get(_memory(tensor))) for tensor in _tensors_in(states))
        return {number: optimizer for number, optimizer in found if optimizer is not None}

    def __call__(self, leaf: Leaf) -> bool:
        """Returns whether the copy of a leaf may go on beside the training."""
        return leaf.owner is not None and self._overlap.get(id(leaf.owner), False)

    def begin(self, pending: Pending) -> None:
        """Closes the fences, and lets the copy go on."""
        for fenced in self._fenced:
            fenced.last = pending
            fenced.fence.guard(pending.staging)
            fenced.fence.forget()
        pending.staging.go()


def _memory(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns where a tensor lies here, and how; for a DTensor, its shard."""
    return place(tensor)[1:]


def _tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yields the tensors that a step writes."""
    for group in optimizer.param_groups:
        yield from (param for param in group["params"] if not is_left_alone(param))
    for state in optimizer.state.values():
        yield from _tensors_in(state)


def _tensors_in(node: object) -> Iterator[torch.Tensor]:
    if isinstance(node, (torch.Tensor, Sharded)):
        tensor = local_of(node)
        if tensor.layout == torch.strided and not is_subclass(tensor):
            yield tensor
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _tensors_in(value)
    elif isinstance(node, Sequence) and not isinstance(node, (str, bytes)):
        for value in node:
            yield from _tensors_in(value)
