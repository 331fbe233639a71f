"""Which optimizer owns which tensor: its step is the only writer of its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from ckptlib.format.tagged_values import MAX_DEPTH, Where, text_of
from ckptlib.state.frameworks import unwrapped
from ckptlib.state.leaf import PLAIN, PerRank
from ckptlib.state.visitor import too_deep


def owners_in(state: object) -> dict[int, torch.optim.Optimizer]:
    """By id of parameter. Before any tensor is looked at, since a tensor may stand before its owner."""
    return {
        id(p): optimizer for optimizer in _optimizers_in(state) for g in optimizer.param_groups for p in g["params"]
    }


def _optimizers_in(node: object, where: Where = "", depth: int = 0) -> Iterator[torch.optim.Optimizer]:
    if depth > MAX_DEPTH:
        raise too_deep(text_of(where))
    if isinstance(node, PerRank):
        yield from _optimizers_in(node.value, where, depth + 1)
    elif isinstance(node, torch.optim.Optimizer):
        inner = unwrapped(node)
        if isinstance(inner, torch.optim.Optimizer):  # what is not is refused where it is met
            yield inner
    elif isinstance(node, Mapping):
        for key, value in node.items():
            if type(value) in PLAIN:  # there may be thousands
                continue
            yield from _optimizers_in(value, (where, key), depth + 1)
    elif isinstance(node, (list, tuple)):
        for i, value in enumerate(node):
            yield from _optimizers_in(value, (where, i), depth + 1)
