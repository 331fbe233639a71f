"""Runs modules' own code for loads: hooks behind `load_state_dict()`, and methods in place of torch's.

A load fills parameters in place. A module that derives something from them, such as a copy in another dtype, must renew
it as it would after torch's load.
"""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from inspect import Parameter, signature
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from ckptlib.state.subclasses import is_subclass
from ckptlib.state.wrappers import canonical, inner_name

There: TypeAlias = Callable[[], Mapping[int, "weakref.ref[nn.Parameter]"]]
"""Returns, by id, the parameters of the outermost module before the first call."""


def parameters_there(top: nn.Module) -> There:
    """Returns the parameters of this module; collected once for all calls."""
    return cache(lambda: {id(param): weakref.ref(param) for param in top.parameters()})


def own_loads(
    top: nn.Module, filled: Iterable[str], done: Sequence[nn.Module], there: There
) -> list[Callable[[], None]]:
    """Returns the calls to make, in this order, when everything is filled. Collective if the hooks and methods are.

    `filled`: canonical names; modules in which nothing is filled are left alone. `done`: modules that are loaded
    anyway, with everything in them.
    """
    outermost = innermost(top)
    own = [(name, m) for name, m in top.named_modules() if _loads_itself(m, m is outermost) or _post_hooks(m)]
    above = _above(filled) if own else set()
    covered = {id(inner) for module in done for inner in module.modules()}
    calls: list[Callable[[], None]] = []
    for name, module in own:
        if id(module) in covered or _path(top, name) not in above:
            continue
        if _loads_itself(module, module is outermost):
            covered.update(map(id, module.modules()))
            calls.append(partial(_load_again, module, module is outermost, there))
        else:
            calls.append(partial(_run_post_hooks, module, there))
    return calls[::-1]  # as in torch, inner modules come first


def give(module: nn.Module, state: dict[str, Any], is_outermost: bool) -> object:
    """Calls `load_state_dict()`, which may be a method of the job's own without `strict`.

    For an inner module, calls torch's if its `_load_from_state_dict()` takes what torch's `state_dict()` returns: torch
    calls no other there, and the job's own may want a state of another form.
    """
    if not is_outermost and _takes_state(module) and is_of_torch(type(module).state_dict):
        return nn.Module.load_state_dict(module, state, strict=False)
    parameters = signature(module.load_state_dict).parameters
    knows = "strict" in parameters or any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())
    return module.load_state_dict(state, strict=False) if knows else module.load_state_dict(state)


@contextmanager
def keeping_parameters(module: nn.Module, there: There) -> Iterator[None]:
    """Puts back parameters that the body replaces, with the new ones' values: an optimizer has the old ones, and would
    otherwise train nothing that the module has. A parameter that is now tied to another of those `there` stays so, and
    one that was made of other tensors, as by quantizing it, stays what it is."""
    before = dict(module.named_parameters(remove_duplicate=False))
    known, others = {*map(id, before.values())}, there()
    holders: dict[int, nn.Module] = {}
    yield
    for name, new in [*module.named_parameters(remove_duplicate=False)]:
        old = before.get(name)
        if id(new) in known or old is None or old.is_meta or (old.shape, old.dtype) != (new.shape, new.dtype):
            continue
        if (other := others.get(id(new))) is not None and other() is new:
            continue
        if is_subclass(new) and type(new) is not type(old):
            continue
        old.copy_(new)
        owner, _, attribute = name.rpartition(".")
        holder = module.get_submodule(owner)
        setattr(holder, attribute, old)  # an RNN notes it in a list of its own
        holders[id(holder)] = holder
    for holder in holders.values():  # FSDP2 has taken over the new ones
        _run_hooks(holder, [hook for hook in holder._load_state_dict_post_hooks.values() if is_of_torch(hook)])


def is_of_torch(function: object) -> bool:
    """Returns whether a function is torch's."""
    return str(getattr(function, "__module__", None)).partition(".")[0] == "torch"


def resizes(module: nn.Module, attribute: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Returns whether a module's own `_load_from_state_dict()` gives its buffer the shape of what is loaded, as torch's
    fake quantizers do, whose buffers are as large as the data they have seen. A copy of the module is tried. `shapes`:
    of those of its buffers that were saved, by attribute."""
    if not _takes_state(module) or attribute not in module._buffers:
        return False
    if type(module._buffers[attribute]) is not torch.Tensor:
        return False
    state: dict[str, Any] = {}
    problems: list[str] = []
    try:
        trial = _copy_of(module)
        for name, inner in trial.named_modules():
            inner._save_to_state_dict(state, f"{name}." if name else "", True)
        for name in shapes.keys() & state.keys():
            state[name] = state[name].new_zeros(()).expand(shapes[name])
        trial._load_from_state_dict(state, "", {"version": module._version}, False, [], [], problems)
    except Exception:  # whatever its own code raises: it does not take these shapes, and the mismatch is reported
        return False
    found = trial._buffers.get(attribute)
    return not problems and found is not None and tuple(found.shape) == shapes[attribute]


def _takes_state(module: nn.Module) -> bool:
    """Returns whether a module has a `_load_from_state_dict()` of its own, or of its kind, such as BatchNorm's."""
    return type(module)._load_from_state_dict is not nn.Module._load_from_state_dict


def _copy_of(module: nn.Module) -> Any:
    """Returns a copy of a module, with copies of its tensors, its containers and the modules in it: a loader may
    replace these, or write to them. Hooks are left out: they may hold the module itself, and change that."""
    made: Any = copy.copy(module)
    vars(made).update((name, _apart(held)) for name, held in vars(module).items() if name not in _REGISTERED)
    made._load_state_dict_pre_hooks, made._load_state_dict_post_hooks = {}, {}
    for kind in _TENSORS:
        own = getattr(module, kind).items()
        setattr(made, kind, {name: None if held is None else held.detach().clone() for name, held in own})
    inside = module._modules.items()
    made._modules = {name: None if child is None else _copy_of(child) for name, child in inside}
    return made


_TENSORS = ("_parameters", "_buffers")
_REGISTERED = (*_TENSORS, "_modules")


def _apart(held: Any) -> Any:
    """Returns a copy of a tensor, or of a container with copies of these in it; any other object as it is."""
    if isinstance(held, torch.Tensor):
        return held.detach().clone()
    if type(held) in (list, tuple, set, deque):
        return type(held)(map(_apart, held))
    if type(held) in (dict, OrderedDict):
        return type(held)((key, _apart(value)) for key, value in held.items())
    return held


def innermost(module: nn.Module) -> nn.Module:
    """Returns the module without wrappers, whose own `load_state_dict()` torch calls."""
    while (inner := inner_name(module)) is not None:
        module = module._modules[inner]  # type: ignore[assignment]
    return module


def _loads_itself(module: nn.Module, is_outermost: bool) -> bool:
    """Returns whether a module has a method of its own. `load_state_dict()` counts for the outermost module only: torch
    calls no other."""
    cls = type(module)
    return not is_of_torch(cls._load_from_state_dict) or (is_outermost and not is_of_torch(cls.load_state_dict))


def _post_hooks(module: nn.Module) -> list[Callable[..., object]]:
    """Returns a module's post-hooks except torch's: FSDP2 has one for each parameter, in case that another is
    assigned."""
    return [hook for hook in module._load_state_dict_post_hooks.values() if not is_of_torch(hook)]


def _path(top: nn.Module, name: str) -> str:
    """Returns the canonical name of a submodule."""
    return canonical(top, f"{name}.x" if name else "x").rpartition(".")[0]


def _above(names: Iterable[str]) -> set[str]:
    """Returns the modules, by canonical name, that contain these names."""
    found: set[str] = set()
    for name in names:
        while name and (name := name.rpartition(".")[0]) not in found:
            found.add(name)
    return found


def _load_again(module: nn.Module, is_outermost: bool, there: There) -> None:
    """Gives a module its own state. Copying a tensor onto itself changes nothing."""
    with _mode_of(module), torch.no_grad(), keeping_parameters(module, there):
        state = module.state_dict(keep_vars=True)
        if is_outermost:
            give(module, state, is_outermost)
        else:
            nn.Module.load_state_dict(module, state, strict=False)


def _run_post_hooks(module: nn.Module, there: There) -> None:
    with _mode_of(module), torch.no_grad(), keeping_parameters(module, there):
        _run_hooks(module, _post_hooks(module))


def _run_hooks(module: nn.Module, hooks: Iterable[Callable[..., object]]) -> None:
    for hook in hooks:
        hook(module, _IncompatibleKeys([], []))


def _mode_of(module: nn.Module) -> torch.inference_mode:
    """Returns the mode to write in: tensors that were made in inference mode can be written to in that mode alone."""
    tensors = chain(module.parameters(), module.buffers())
    return torch.inference_mode(any(tensor.is_inference() for tensor in tensors))
