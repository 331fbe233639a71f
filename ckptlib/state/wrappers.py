"""Recognises modules that wrap another one, and names without them.

Wrappers are known by their type and never by a piece of a name, so a user's own layer called "module" keeps its name.
"""

from __future__ import annotations

import sys

from torch import nn


def inner_name(module: nn.Module) -> str | None:
    """Returns the attribute in which a wrapper keeps the module it wraps; None if this is no wrapper."""
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
    """Returns the name without wrappers. A wrapper's own hooks may have dropped its segment already."""
    names, segments = [], key.split(".")
    at: nn.Module | None = module
    while segments:
        inner = None if at is None else inner_name(at)
        if at is not None and inner is not None:
            if segments[0] == inner:
                segments.pop(0)
            at = at._modules[inner]
            continue
        segment = segments.pop(0)
        names.append(segment)
        at = None if at is None else submodule_of(at, segment)
    return ".".join(names)


def submodule_of(module: nn.Module, name: str) -> nn.Module | None:
    """Returns the child of that name, if there is one. The children of a ScriptModule are no dict, and have no
    `get`."""
    children = module._modules
    return children[name] if name in children else None  # noqa: SIM401


def is_extra_state(name: str) -> bool:
    """Returns whether a key of `state_dict()` is that of a module's `get_extra_state()`."""
    return name.rpartition(".")[2] == "_extra_state"
