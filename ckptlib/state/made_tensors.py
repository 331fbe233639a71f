"""Entries of a module's `state_dict()` beside its own tensors: tensors that hooks make, such as the parts of a fused
weight, and other objects, such as the list of tensors that a metric has gathered.

They are saved as they are returned. Loading into them changes nothing of the module, so what was loaded goes to
`load_state_dict()` of the submodule whose hooks know the way back. For tensors, `state_dict()` must then return the
same again.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptlib.errors import StateMismatch, UnsupportedState
from ckptlib.state.leaf import PLAIN
from ckptlib.state.own_loads import There, give, is_of_torch, keeping_parameters
from ckptlib.state.places import own_part
from ckptlib.state.raw_bytes import bytes_of, dense
from ckptlib.state.structure import is_of_fsdp
from ckptlib.state.subclasses import apart, is_subclass
from ckptlib.state.wrappers import canonical, inner_name, is_extra_state, submodule_of

log = logging.getLogger(__name__)


class Holder(NamedTuple):
    """A submodule that turns what its `state_dict()` makes back into its own state."""

    module: nn.Module
    name: str
    """The entry's name within the submodule."""


def made_in(module: nn.Module, state: Mapping[str, object], path: str) -> dict[str, Holder]:
    """Returns, by canonical name, the entries of the module's `state_dict()` (`state`) that are not in its own memory.

    Raises UnsupportedState for a tensor that no submodule would turn back: a load into it would be lost. Leaves out
    other objects that would be lost: a save refuses them, and a load goes on without.
    """
    tensors = [t for m in module.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None]
    own = {id(tensor) for tensor in tensors}
    others = {key: value for key, value in state.items() if id(value) not in own and not is_extra_state(key)}
    if not others:
        return {}
    memory = {part.untyped_storage().data_ptr() for tensor in tensors for part in _plain(tensor, path)}
    found = {}
    for key, value in others.items():
        if isinstance(value, torch.Tensor) and not _is_made(value, memory, path):
            continue
        name = canonical(module, key)
        holder = _holder_of(module, name)
        if holder is not None:
            found[name] = holder
        elif isinstance(value, torch.Tensor):
            raise UnsupportedState(
                f"{path}: state_dict() returns a copy of {key!r}, not the module's own tensor, so load could not fill "
                "it in place, and no load_state_dict() pre-hook would turn it back; register one, or pass an object "
                f"whose state_dict() and load_state_dict() call the module's{_or_what_is_trained(module)}"
            )
    return found


def _or_what_is_trained(module: nn.Module) -> str:
    """Returns advice for a frozen base, whose quantized weights need not be saved to train adapters."""
    if len({parameter.requires_grad for parameter in module.parameters()}) < 2:
        return ""
    return (
        ". Or save what is trained alone, since some of its parameters are frozen: {name: p for name, p in "
        "model.named_parameters() if p.requires_grad}"
    )


def lost(value: object, name: str) -> UnsupportedState:
    """Returns the refusal of an entry that is no tensor, and that no submodule would take back."""
    return UnsupportedState(
        f"{name}: state_dict() returns a {type(value).__qualname__}, and no load_state_dict() pre-hook or "
        "_load_from_state_dict() would take it back; give that submodule one, or get_extra_state() and "
        "set_extra_state(), or pass an object whose state_dict() and load_state_dict() call the module's"
    )


def put_back(module: nn.Module, filled: Mapping[str, object], is_outermost: bool, there: There) -> None:
    """Gives what was loaded back to a module. `filled`: by name within the module, what its `state_dict()` made, and a
    load filled or made anew. `there`: see `keeping_parameters`.

    Collective if the hooks are. Raises StateMismatch if `state_dict()` then returns other tensors.
    """
    with torch.no_grad():
        state = copy.copy(module.state_dict(keep_vars=True))  # with the versions that torch puts beside it
        names = {key: canonical(module, key) for key in state}
        state.update({key: filled[name] for key, name in names.items() if name in filled})
        with keeping_parameters(module, there):
            told = give(module, state, is_outermost)
        for key in getattr(told, "unexpected_keys", ()):
            if key in names and names[key] in filled and not isinstance(state[key], torch.Tensor):
                log.warning("%s: nothing of %s takes what was loaded", names[key], type(module).__qualname__)
        for key, value in module.state_dict(keep_vars=True).items():
            wanted = filled.get(names.get(key, key))
            if isinstance(wanted, torch.Tensor) and not _equal(wanted, value):
                raise StateMismatch(
                    f"{names[key]}: {type(module).__qualname__}.load_state_dict() was given what was loaded, and its "
                    "state_dict() gives something else now; its hooks do not turn back what they make"
                )


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether two tensors are equal, bit for bit, on this rank."""
    one, other = (bytes_of(dense(own_part(tensor))) for tensor in (first, second))
    return torch.equal(one, other)


def _is_made(value: torch.Tensor, memory: set[int], path: str) -> bool:
    if value.device.type == "meta":
        return True
    local = own_part(value)
    if type(local) not in PLAIN and not is_subclass(local):
        return isinstance(value, DTensor)  # a result of communication; nothing is known of other kinds
    return any(part.numel() and part.untyped_storage().data_ptr() not in memory for part in _plain(local, path))


def _plain(value: torch.Tensor, path: str) -> list[torch.Tensor]:
    """Returns the plain tensors that a value is, or is made of."""
    local = own_part(value)
    parts = [inner for _, inner in apart(local, path).tensors] if is_subclass(local) else [local]
    return [part for part in parts if type(part) in PLAIN]


def _holder_of(module: nn.Module, name: str) -> Holder | None:
    """Returns the outermost submodule on the way to that name which has a hook that may turn it back."""
    rest, at = name.split("."), module
    while True:
        inner = inner_name(at)
        if inner is not None:
            at = at._modules[inner]  # type: ignore[assignment]
            continue
        if _turns_back(at):
            return Holder(at, ".".join(rest))
        below = submodule_of(at, rest.pop(0)) if rest else None
        if below is None:
            return None
        at = below


def _turns_back(module: nn.Module) -> bool:
    """Returns whether a module has a pre-hook of `load_state_dict()` that is not FSDP2's, or its own way to load."""
    hooks = (getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values())
    if not all(map(is_of_fsdp, hooks)):
        return True
    return not (is_of_torch(type(module).load_state_dict) and is_of_torch(type(module)._load_from_state_dict))
