"""DCP's state dicts as states of ckptlib, and back.

For DCP, a list or tuple in which there is no tensor is one value: a load replaces it, whatever length it has now.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer


@runtime_checkable
class Stateful(Protocol):
    """DCP's protocol of the same name."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class _Value:
    """A list or tuple without tensors."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state["value"]


def gives_state(value: object) -> TypeGuard[Stateful]:
    """Whether its `state_dict()` is saved. Modules and optimizers are saved as they are: by names of parameters."""
    return isinstance(value, Stateful) and not isinstance(value, (nn.Module, Optimizer))


def model_of(optim: Optimizer, states: Mapping[str, object]) -> nn.Module | None:
    """The module beside an optimizer that has its parameters."""
    params = {id(param) for group in optim.param_groups for param in group["params"]}
    modules = (value for value in states.values() if isinstance(value, nn.Module))
    return next((module for module in modules if params <= {*map(id, module.parameters())}), None)


def asked(state_dict: Mapping[str, object]) -> dict[str, Any]:
    """The same, with the state of each object that gives one."""
    return {key: value.state_dict() if gives_state(value) else value for key, value in state_dict.items()}


def wrapped(states: Mapping[str, object]) -> dict[str, Any]:
    """The same tensors in containers of its own, where lists and tuples without any are one value each."""
    return {key: _wrapped(value) for key, value in states.items()}


def _wrapped(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: _wrapped(value) for key, value in node.items()}
    if type(node) not in (list, tuple):
        return node
    return type(node)(map(_wrapped, node)) if _has_state(node) else _Value(node)


def _has_state(node: object) -> bool:
    if isinstance(node, Mapping):
        return any(map(_has_state, node.values()))
    if isinstance(node, (list, tuple)):
        return any(map(_has_state, node))
    return isinstance(node, (torch.Tensor, nn.Module, Optimizer, torch.Generator, Stateful))


def unwrap(states: dict[str, Any], loaded: Mapping[str, Any]) -> None:
    """Puts what a load left in `loaded`, which `wrapped` made of `states`, where it belongs."""
    for key, value in loaded.items():
        states[key] = _unwrapped(states[key], value)


def _unwrapped(node: Any, loaded: Any) -> Any:
    if isinstance(loaded, _Value):
        return loaded.value
    if isinstance(node, dict):
        for key, value in loaded.items():
            node[key] = _unwrapped(node[key], value)
        return node
    if type(node) in (list, tuple):
        values = [_unwrapped(a, b) for a, b in zip(node, loaded, strict=True)]
        if isinstance(node, tuple):
            return tuple(values)
        node[:] = values
        return node
    return loaded
