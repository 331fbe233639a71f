"""The tensors in what an optimizer keeps for its parameters, also those in lists, tuples and dicts.

Knows where they stand, and which of them are DTensors; their names are in `ckptlib.state.optimizers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from ckptlib.format.paths import segment_of
from ckptlib.format.tagged_values import MAX_DEPTH
from ckptlib.state.leaf import PLAIN
from ckptlib.state.visitor import SCALARS, are_scalars, too_deep


def tensors_in(value: object, *keys: object) -> Iterator[tuple[tuple[object, ...], torch.Tensor]]:
    """Those of an entry of a parameter's state, each with the keys that lead to it. `keys`: those of the entry.

    Raises UnsupportedState for an entry that contains itself: it may have more ways in it than can be walked.
    """
    if isinstance(value, torch.Tensor):
        yield keys, value
    elif isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and not are_scalars(value)):
        if len(keys) > MAX_DEPTH + 1:
            raise too_deep("/".join(map(str, keys)))
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if type(item) not in SCALARS:
                yield from tensors_in(item, *keys, key)


def whole_dtensors(optimizer: torch.optim.Optimizer) -> list[str]:
    """The keys of state whose tensors are DTensors that are whole on each rank, and are not placed as their parameter
    is. Placements and shape tell no such tensor from a plain one. Raises as `tensors_in` does."""
    found = {
        "/".join(map(segment_of, keys))
        for param, state in optimizer.state.items()
        if isinstance(param, DTensor)
        for key, value in state.items()
        if type(value) not in PLAIN and type(value) not in SCALARS
        for keys, tensor in tensors_in(value, key)
        if isinstance(tensor, DTensor)
        and all(placement.is_replicate() for placement in tensor.placements)
        and (tensor.shape, tensor.placements) != (param.shape, param.placements)
    }
    return sorted(found)
