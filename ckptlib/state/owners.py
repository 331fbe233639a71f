"""Finds which optimizer owns which tensor: its step is the only writer of its parameters, but for those that a forward
writes to, and those that have no gradient, and ask for none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from ckptlib.format.tagged_values import MAX_DEPTH, Where, text_of
from ckptlib.state.frameworks import unwrapped
from ckptlib.state.leaf import PLAIN, PerRank
from ckptlib.state.visitor import SCALARS, are_scalars, too_deep

_OWN_NOTHING = frozenset([*PLAIN, *SCALARS])


def owned_in(state: object) -> list[object]:
    """Returns each optimizer of the state, followed by its parameters, and each module."""
    owned: list[object] = []
    for one in _owners_in(state):
        owned.append(one)
        if isinstance(one, torch.optim.Optimizer):
            for group in one.param_groups:
                owned += group["params"]
    return owned


def owners_of(owned: Sequence[object]) -> dict[int, torch.optim.Optimizer]:
    """Returns the optimizer of each parameter, by the parameter's id. Needed before any tensor is looked at, since a
    tensor may come before its owner."""
    owners: dict[int, torch.optim.Optimizer] = {}
    for one in owned:
        if isinstance(one, torch.optim.Optimizer):
            owner = one
        elif not isinstance(one, nn.Module):
            owners[id(one)] = owner
    return owners


def frozen_in(owned: Sequence[object]) -> set[int]:
    """Returns the ids of the optimizers' parameters that a step leaves alone. So whatever writes to one does not wait
    at the fence: MoCo's forward writes to its momentum encoder, which `model.parameters()` gives to the optimizer like
    all others."""
    return {id(one) for one in owned if isinstance(one, torch.Tensor) and is_left_alone(one)}


def is_left_alone(param: torch.Tensor) -> bool:
    """Returns whether an optimizer's step leaves the parameter alone: it asks for no gradient, and has none. A GAN's
    discriminator asks for none while the generator trains, but has those of its own step."""
    return not param.requires_grad and param.grad is None


def written_in_forward(owned: Sequence[object]) -> set[int]:
    """Returns the ids of the parameters that a forward writes to, so that no optimizer's step is their only writer: an
    embedding with `max_norm` scales the rows that it looks up. A sharded one looks them up in a copy."""
    modules = chain.from_iterable(one.modules() for one in owned if isinstance(one, nn.Module))
    found = (inner for inner in modules if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)))
    weights = (inner._parameters.get("weight") for inner in found if inner.max_norm is not None)
    return {id(weight) for weight in weights if type(weight) in PLAIN}


def _owners_in(node: object, where: Where = "", depth: int = 0) -> Iterator[torch.optim.Optimizer | nn.Module]:
    if depth > MAX_DEPTH:
        raise too_deep(text_of(where))
    if isinstance(node, PerRank):
        yield from _owners_in(node.value, where, depth + 1)
    elif isinstance(node, nn.Module):
        yield node
    elif isinstance(node, torch.optim.Optimizer):
        inner = unwrapped(node)
        if isinstance(inner, torch.optim.Optimizer):  # anything else is refused when the walk meets it
            yield inner
    elif isinstance(node, Mapping):
        for key, value in node.items():
            if type(value) in _OWN_NOTHING:  # there may be thousands
                continue
            yield from _owners_in(value, (where, key), depth + 1)
    elif isinstance(node, (list, tuple)) and not are_scalars(node):
        for i, value in enumerate(node):
            yield from _owners_in(value, (where, i), depth + 1)
