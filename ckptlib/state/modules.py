"""A module's tensors under canonical names: those that the bare model would give them.

Wrappers are known by their type and never by a piece of a name, so a user's own layer called "module" keeps its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ckptlib.errors import UnsupportedState
from ckptlib.state.subclasses import apart, is_subclass

_REFUSED = {
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): (
        "FSDP1 flattens parameters; use FSDP2: torch.distributed.fsdp.fully_shard(model)"
    ),
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "save engine.module under ZeRO stage 0-1, or use FSDP2",
    ("megatron.core.distributed.distributed_data_parallel", "DistributedDataParallel"): (
        "give the wrapped module itself; its optimizer shards flat buffers that ckptlib cannot name"
    ),
}


def named_state(module: nn.Module, path: str) -> Iterator[tuple[str, object]]:
    """(canonical name, tensor or extra state) in the order of `state_dict()`, which is called once.

    Parameters come as they are (the objects that an optimizer holds), after any resharding that `state_dict()` does.
    Raises UnsupportedState for wrappers that hide their parameters.
    """
    known = _names.get(module)
    if known is None:
        _refuse(module, path)
    state = module.state_dict(keep_vars=True)
    if known is None:
        _refuse_copies(module, state, path)
    names = _names.setdefault(module, {})
    for key, value in state.items():
        name = names.get(key)
        if name is None:
            name = names[key] = canonical(module, key)
        yield name, value


_names: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
"""By module: the canonical name of each key. A wrapper put around a part of it later gives that part's keys anew."""


def _refuse(module: nn.Module, path: str) -> None:
    for submodule in module.modules():
        for cls in type(submodule).__mro__:
            remedy = _REFUSED.get((cls.__module__, cls.__name__))
            if remedy is not None:
                raise UnsupportedState(f"{path}: {cls.__name__} cannot be saved: {remedy}")


def _refuse_copies(module: nn.Module, state: Mapping[str, object], path: str) -> None:
    """Refuses a tensor that a hook of `state_dict()` made: not the module's own, so a load into it would be lost."""
    tensors = [t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    own = {id(tensor) for tensor in tensors}
    others = {k: v for k, v in state.items() if id(v) not in own and not is_extra_state(k)}
    made = {k: parts for k, v in others.items() if (parts := _plain(v, path))}
    if not made:
        return
    memory = {part.untyped_storage().data_ptr() for tensor in tensors for part in _plain(tensor, path)}
    for key, parts in made.items():
        if any(part.numel() and part.untyped_storage().data_ptr() not in memory for part in parts):
            raise UnsupportedState(
                f"{path}: state_dict() returns a copy of {key!r}, not the module's own tensor, so load could not "
                "fill it in place; pass an object whose state_dict() and load_state_dict() call the module's"
            )


def _plain(value: object, path: str) -> list[torch.Tensor]:
    """The plain tensors that a value is, or is made of."""
    parts = [inner for _, inner in apart(value, path).tensors] if is_subclass(value) else [value]
    return [part for part in parts if isinstance(part, torch.Tensor) and type(part) in _PLAIN]


_PLAIN = (torch.Tensor, nn.Parameter)


def is_extra_state(name: str) -> bool:
    """Whether a key of `state_dict()` is what a module's `get_extra_state()` gave."""
    return name.rpartition(".")[2] == "_extra_state"


def _inner_name(module: nn.Module) -> str | None:
    """The attribute in which a wrapper keeps the module it wraps; None for what is no wrapper."""
    if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        return "module"
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return "_orig_mod"
    wrapper = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    if wrapper is not None and isinstance(module, wrapper.ActivationWrapper):
        return "_checkpoint_wrapped_module"
    return None


def canonical(module: nn.Module, key: str) -> str:
    """The name without wrappers. A wrapper's own hooks may have dropped its segment already."""
    names, segments = [], key.split(".")
    at: nn.Module | None = module
    while segments:
        inner = None if at is None else _inner_name(at)
        if at is not None and inner is not None:
            if segments[0] == inner:
                segments.pop(0)
            at = at._modules[inner]
            continue
        segment = segments.pop(0)
        names.append(segment)
        at = None if at is None else at._modules.get(segment)
    return ".".join(names)


def owners_of(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """By id of tensor: the submodules and attributes that hold it; more than one when it is tied."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for submodule in module.modules():
        tensors: list[tuple[str, torch.Tensor | None]] = [*submodule._parameters.items(), *submodule._buffers.items()]
        for name, tensor in tensors:
            if tensor is not None:
                holders.setdefault(id(tensor), []).append((submodule, name))
    return holders
