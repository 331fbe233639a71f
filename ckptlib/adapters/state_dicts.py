"""Converts DCP's state dicts to states of ckptlib, and back.

For DCP, a list or tuple without tensors is one value: a load replaces it, whatever length it has now.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.optim import Optimizer

from ckptlib.format.paths import join
from ckptlib.state.leaf import Sharded, home_of


@runtime_checkable
class Stateful(Protocol):
    """DCP's protocol of the same name."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class _Value:
    """A list or tuple without tensors, as an object."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> object:
        return self.value

    def load_state_dict(self, state: object) -> None:
        """Loads the value, which versions before 0.3 saved in a dict."""
        self.value = state["value"] if isinstance(state, dict) else state


def gives_state(value: object) -> TypeGuard[Stateful]:
    """Returns whether its `state_dict()` is saved. Modules and optimizers are saved themselves: by parameter names."""
    # tensors first: asking one for a protocol costs 8 us, and there are thousands
    return not isinstance(value, (torch.Tensor, nn.Module, Optimizer)) and isinstance(value, Stateful)


def model_of(optim: Optimizer, states: Mapping[str, object]) -> nn.Module | None:
    """Returns the module beside an optimizer that has its parameters, or None."""
    params = {id(param) for group in optim.param_groups for param in group["params"]}
    modules = (value for value in states.values() if isinstance(value, nn.Module))
    return next((module for module in modules if params <= {*map(id, module.parameters())}), None)


def asked(state_dict: Mapping[str, object]) -> dict[str, Any]:
    """Returns the same entries, with the state of each object that gives one.

    Asks them in the order of their keys, as a `state_dict()` may be a collective and ranks may have added the entries
    in different orders.
    """
    given = {key: state_dict[key] for key in sorted(state_dict, key=str)}
    found = {key: value.state_dict() if gives_state(value) else value for key, value in given.items()}
    return {key: found[key] for key in state_dict}


def wrapped(states: Mapping[str, object], allocate: bool = False) -> dict[str, Any]:
    """Returns the same tensors in new containers, in which each list or tuple without tensors is one value.

    allocate: give tensors on the meta device memory, which is to be filled. Never for a save.
    """
    return {key: _wrapped(value, allocate) for key, value in states.items()}


def _wrapped(node: Any, allocate: bool) -> Any:
    if isinstance(node, Mapping):
        return {key: _wrapped(value, allocate) for key, value in node.items()}
    if isinstance(node, ShardedTensor):  # with several shards, saves and loads refuse it, on all ranks
        return _box_of(node) if len(node.local_shards()) <= 1 else node
    if allocate and isinstance(node, torch.Tensor) and node.is_meta:
        return torch.empty_like(node, device=home_of(node))
    if type(node) not in (list, tuple):
        return node
    return type(node)(_wrapped(value, allocate) for value in node) if _has_state(node) else _Value(node)


def _box_of(tensor: ShardedTensor) -> Sharded:
    """Returns this rank's box of a tensor of FSDP1 or torchrec, in the same memory."""
    shards, shape = tensor.local_shards(), tuple(tensor.size())
    if not shards:
        return Sharded(torch.empty([0] * len(shape), dtype=tensor.dtype), (0,) * len(shape), shape)
    return Sharded(shards[0].tensor, tuple(shards[0].metadata.shard_offsets), shape)


def _has_state(node: object) -> bool:
    if isinstance(node, Mapping):
        return any(map(_has_state, node.values()))
    if isinstance(node, (list, tuple)):
        return any(map(_has_state, node))
    return isinstance(node, (torch.Tensor, nn.Module, Optimizer, torch.Generator, Stateful))


def unwrap(states: dict[str, Any], loaded: Mapping[str, Any], missing: Collection[str] = ()) -> None:
    """Puts the content that a load left in `loaded`, which `wrapped` made of `states`, where it belongs.

    missing: names that were not filled; their tensors on the meta device stay there.
    """
    for key, value in loaded.items():
        states[key] = _unwrapped(states[key], value, join("", key), missing)


def _unwrapped(node: Any, loaded: Any, path: str, missing: Collection[str]) -> Any:
    if isinstance(loaded, _Value):
        return loaded.value
    if isinstance(node, ShardedTensor) or (isinstance(node, torch.Tensor) and path in missing):
        return node
    if isinstance(node, dict):
        for key, value in loaded.items():
            if key in node:  # else only the checkpoint has it
                node[key] = _unwrapped(node[key], value, join(path, key), missing)
        return node
    if type(node) in (list, tuple):
        pairs = enumerate(zip(node, loaded, strict=True))
        values = [_unwrapped(a, b, join(path, i), missing) for i, (a, b) in pairs]
        if isinstance(node, tuple):
            return tuple(values)
        node[:] = values
        return node
    return loaded
