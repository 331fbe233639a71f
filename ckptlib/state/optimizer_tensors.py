"""Finds the tensors in what an optimizer keeps for its parameters, also those in lists, tuples and dicts.

This module knows where they are, and which of them are DTensors; their names are in `ckptlib.state.optimizers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain

import torch
from torch.distributed.tensor import DTensor, Replicate

from ckptlib.format.paths import segment_of
from ckptlib.format.tagged_values import MAX_DEPTH
from ckptlib.state.leaf import PLAIN
from ckptlib.state.visitor import SCALARS, are_scalars, too_deep


def tensors_in(value: object, *keys: object) -> Iterator[tuple[tuple[object, ...], torch.Tensor]]:
    """Yields the tensors of an entry of a parameter's state, each with the keys that lead to it. `keys`: those of the
    entry.

    Raises UnsupportedState for an entry that contains itself: it may have more paths than can be walked.
    """
    if isinstance(value, torch.Tensor):
        yield keys, value
    elif isinstance(value, Mapping) or (isinstance(value, (list, tuple)) and not are_scalars(value)):
        if len(keys) > MAX_DEPTH + 1:
            raise too_deep("/".join(map(str, keys)))
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            if type(item) not in SCALARS:
                yield from tensors_in(item, *keys, key)


def whole_dtensors(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> dict[str, list[str]]:
    """Returns, by parameter name, the paths in its state of DTensors that are whole on each rank, and not placed as the
    parameter. Placements and shape do not tell such a tensor from a plain one.

    `names`: of the parameters, group by group. Raises as `tensors_in` does.
    """
    found: dict[str, list[str]] = {}
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for name, param in zip(names, params, strict=True):
        for key, value in optimizer.state.get(param, {}).items() if isinstance(param, DTensor) else ():
            if type(value) in PLAIN or type(value) in SCALARS:  # nearly all, or else a DTensor
                continue
            within = [((key,), value)] if isinstance(value, DTensor) else tensors_in(value, key)
            for keys, tensor in within:
                if isinstance(tensor, DTensor) and _is_whole(tensor) and not _is_placed_as(tensor, param):
                    found.setdefault(name, []).append("/".join(map(segment_of, keys)))
    return {name: sorted(paths) for name, paths in found.items()}


def _is_whole(tensor: DTensor) -> bool:
    return {*map(type, tensor._spec.placements)} == {Replicate}  # its property and a generator cost 1 us more


def _is_placed_as(tensor: DTensor, param: DTensor) -> bool:
    return (tensor.shape, tensor.placements) == (param.shape, param.placements)
