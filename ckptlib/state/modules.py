"""A module's tensors under canonical names: those of the bare model, without wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ckptlib.errors import UnsupportedState
from ckptlib.state.frameworks import known_class
from ckptlib.state.made_tensors import Holder, made_in
from ckptlib.state.wrappers import canonical

_REFUSED = {
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): (
        "FSDP1 flattens parameters; use FSDP2: torch.distributed.fsdp.fully_shard(model). Or save what torch's "
        "get_state_dict(model, optimizer) gives, by ckptlib.dcp.save"
    ),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "save engine.module under ZeRO stage 0-1, or use FSDP2",
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"): (
        "give the wrapped module itself; its optimizer shards flat buffers that ckptlib cannot name"
    ),
}


def named_state(module: nn.Module, path: str) -> Iterator[tuple[str, object]]:
    """Yields (canonical name, tensor or extra state) in the order of `state_dict()`, which is called once.

    Parameters come as they are (the objects that an optimizer holds), after any resharding that `state_dict()` does.
    Raises UnsupportedState for wrappers that hide their parameters, and for tensors that a load could not put back.
    """
    state = _asked(module, path)
    _made[module] = frozenset(made_in(module, state, path))  # at each call: a hook may come later, and keep every name
    return _named(module, state)


def made_names(module: nn.Module) -> frozenset[str]:
    """Returns the canonical names of entries that hooks made, or that are no tensors, when `named_state` last
    looked."""
    return _made[module]


def state_to_fill(module: nn.Module, path: str) -> tuple[list[tuple[str, object]], dict[str, Holder]]:
    """Returns the entries of `named_state`, for a load; and by canonical name what turns back those that hooks made."""
    state = _asked(module, path)
    return list(_named(module, state)), made_in(module, state, path)


def _asked(module: nn.Module, path: str) -> Mapping[str, object]:
    if module not in _names:
        _refuse(module, path)
    return module.state_dict(keep_vars=True)


def _named(module: nn.Module, state: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    names = _names.setdefault(module, {})
    for key, value in state.items():
        name = names.get(key)
        if name is None:
            name = names[key] = canonical(module, key)
        yield name, value


_names: MutableMapping[nn.Module, dict[str, str]] = WeakIdKeyDictionary()
"""The canonical name of each key, by module. A wrapper put around a part of it later gives that part's keys anew.

By identity: a module may define its own `==`, as tensordict's parameters compare element by element.
"""

_made: MutableMapping[nn.Module, frozenset[str]] = WeakIdKeyDictionary()
"""The entries that hooks made, by module in the same way."""


def _refuse(module: nn.Module, path: str) -> None:
    for submodule in module.modules():
        known = known_class(submodule, _REFUSED)
        if known:
            raise UnsupportedState(f"{path}: {known[1]} cannot be saved: {_REFUSED[known]}")


def attributes_of(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Returns, by the tensor's id, the submodules and attributes that hold it; more than one if it is tied."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for submodule in module.modules():
        tensors: list[tuple[str, torch.Tensor | None]] = [*submodule._parameters.items(), *submodule._buffers.items()]
        for name, tensor in tensors:
            if tensor is not None:
                holders.setdefault(id(tensor), []).append((submodule, name))
    return holders
