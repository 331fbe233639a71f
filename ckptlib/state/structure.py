"""Tells whether `state_dict()` of a module would return the same tensors as before, without calling it.

torch's own `state_dict()` is a function of some dicts of each submodule and of hooks. If every class has torch's own
methods, every hook is one of torch's that is known here, and all of that holds the same objects as before, it would
return the same tensors under the same names. Otherwise nothing is known, and it is called.

This says nothing of where the tensors lie, of their views and dtypes: `.data` changes those in the same object.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, repeat
from operator import attrgetter, contains, is_, itemgetter, methodcaller
from types import FunctionType
from typing import Any

from torch import nn

_DICTS = ("_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks")
_SET = "_non_persistent_buffers_set"
_TABLES = itemgetter(*_DICTS, _SET)
_METHODS = attrgetter("state_dict", "_save_to_state_dict", "get_extra_state", "__getattribute__")
_OWN_METHODS = ("state_dict", "_save_to_state_dict")
"""Methods that an instance may define for itself."""


def _is_from(function: object, module: str) -> bool:
    """Returns whether a function's code was read from that module's file: a replacement's was not, whatever it calls
    itself."""
    code, source = getattr(function, "__code__", None), getattr(sys.modules.get(module), "__file__", None)
    return code is not None and code.co_filename == source


_STOCK: tuple[object, ...] = _METHODS(nn.Module)
if not all(_is_from(method, nn.Module.__module__) for method in _STOCK[:3]) or _STOCK[3] is not object.__getattribute__:
    _STOCK = ()  # somebody replaced torch's own before this: nothing is known of any class


def _is_stock(cls: type) -> bool:
    """Returns whether instances have torch's own `state_dict()`, and read the dicts that they have in their
    `__dict__`."""
    return _METHODS(cls) == _STOCK and not any(hasattr(cls, name) for name in (*_DICTS, _SET))


class Structure:
    """Everything that a module's `state_dict()` depends on. It is kept here, so that no other object can be taken for
    it."""

    __slots__ = ("_classes", "_empty", "_entries", "_filled", "_groups", "_lengths", "_mixed", "_modules", "_tables")

    def __init__(self, modules: list[nn.Module], groups: list[Any]) -> None:
        """`modules`: all modules of the tree, each once. `groups`: FSDP2's parameter groups, found by hooks."""
        self._modules, self._groups = modules, groups
        self._classes = list(map(type, modules))
        self._tables: list[Any] = []
        self._empty: list[Any] = []
        self._filled: list[Any] = []
        self._mixed: list[tuple[Any, Any, frozenset[str], list[object]]] = []
        """Dicts of buffers of which some are not saved; the names of those, now and as they were; the others. Memory of
        unsaved buffers is not kept."""
        for attributes in map(vars, modules):
            own = _TABLES(attributes)
            buffers, names = attributes["_buffers"], attributes[_SET]
            if names:
                self._mixed.append((buffers, names, frozenset(names), _saved(buffers, names)))
            else:
                self._empty.append(names)
            rest = [table for table in own if table is not names and not (names and table is buffers)]
            self._empty += [table for table in rest if not table]
            self._filled += [table for table in rest if table]
            self._tables += own
        self._lengths = list(map(len, self._filled))
        self._entries = _entries(self._filled)

    def stands(self, top: nn.Module) -> bool:
        """Returns whether `top` still has this structure, and calling its hooks would change nothing."""
        modules = self._modules
        if top is not modules[0]:
            return False
        dicts = list(map(vars, modules))
        try:
            tables = list(chain.from_iterable(map(_TABLES, dicts)))
        except KeyError:
            return False
        return (
            same(self._tables, tables)
            and same(self._classes, list(map(type, modules)))
            and not any(self._empty)
            and self._lengths == list(map(len, self._filled))
            and same(self._entries, _entries(self._filled))
            and all(names == before and same(_saved(held, names), kept) for held, names, before, kept in self._mixed)
            and not any(any(map(contains, dicts, repeat(name))) for name in _OWN_METHODS)
            and all(map(_is_stock, {*self._classes}))
            and all(map(_is_sharded, self._groups))
        )


def structure_of(top: nn.Module) -> Structure | None:
    """Returns a module's structure; None if something about it is not known, so that `state_dict()` must be called each
    time."""
    modules: dict[int, nn.Module] = {}
    groups: dict[int, Any] = {}
    left: list[object] = [top]
    while left:
        module = left.pop()
        if id(module) in modules:
            continue
        if not isinstance(module, nn.Module) or not _is_stock(type(module)):
            return None
        own: list[Any] = [vars(module).get(name) for name in (*_DICTS, _SET)]
        if not {*map(type, own[:-1])} <= {dict, OrderedDict} or type(own[-1]) is not set:
            return None
        _, _, submodules, hooks, pre_hooks, _ = own
        found = [_fsdp_group(hook) for hook in pre_hooks.values()]
        if None in found or not all(map(_is_of_wrapper, hooks.values())):
            return None
        groups.update((id(group), group) for group in found)
        modules[id(module)] = module
        left += [submodule for submodule in reversed(submodules.values()) if submodule is not None]
    structure = Structure(list(modules.values()), list(groups.values()))
    return structure if structure.stands(top) else None


def same(before: Sequence[object], now: Sequence[object]) -> bool:
    """Returns whether both hold the same objects, in the same order."""
    return before is now or (len(before) == len(now) and all(map(is_, before, now)))


def _entries(dicts: Iterable[dict[object, object]]) -> list[object]:
    """Returns keys and values, in an `OrderedDict`'s own order."""
    return [*chain.from_iterable(dicts), *chain.from_iterable(map(methodcaller("values"), dicts))]


def _saved(buffers: dict[str, object], names: Collection[str]) -> list[object]:
    """Returns names and buffers, except those of these names."""
    return [one for name, buffer in buffers.items() if name not in names for one in (name, buffer)]


# Hooks that are known


_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def _fsdp_group(hook: object) -> object | None:
    """Returns the parameter group that this hook of FSDP2 reshards when that is needed; None for any other hook."""
    fsdp: Any = sys.modules.get(_FSDP)
    if fsdp is None or not isinstance(hook, FunctionType) or not _is_from(hook, _FSDP):
        return None
    register: Any = getattr(fsdp.FSDPParamGroup, "_register_state_dict_hooks", None)
    codes = register.__code__.co_consts if _is_from(register, _FSDP) else ()
    cells = hook.__closure__ or ()
    if not any(code is hook.__code__ for code in codes) or len(cells) != 1:
        return None
    group = cells[0].cell_contents
    return group if type(group) is fsdp.FSDPParamGroup and hasattr(group, "is_sharded") else None


_is_sharded: Callable[[object], bool] = attrgetter("is_sharded")


def is_of_fsdp(hook: object) -> bool:
    """Returns whether a hook is one of FSDP2's, which reshard parameters and make nothing."""
    return _fsdp_group(hook) is not None


def _is_of_wrapper(hook: object) -> bool:
    """Returns whether a hook removes the name of activation checkpointing from the keys, and does nothing else."""
    wrapper: Any = sys.modules.get(_WRAPPER)
    known = None if wrapper is None else wrapper.ActivationWrapper._post_state_dict_hook
    return hook is known and _is_from(hook, _WRAPPER)
