"""Containers of plain values that grow: a load gives them their saved entries, in place.

A container that was saved whole, see `ckptlib.state.nests`, gets its saved content. A dict with text keys, whose
entries have names of their own, gets the entries that it lacks. If a value has become a container since, or a container
a value, it becomes the saved one again.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ckptlib.format import values
from ckptlib.format.paths import key_of
from ckptlib.loading.load_plan import LoadPlan, Setter, is_plain_value
from ckptlib.state.nests import is_text
from ckptlib.state.wrappers import is_extra_state


class _Growing(NamedTuple):
    """A dict that gets the entries that it lacks."""

    node: MutableMapping[Any, Any]
    path: str
    given: Setter = None
    """Puts the dict in the place of a value, if it gets any entry."""


class NestTargets:
    """Adds containers that hold nothing but plain values to a plan."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._filled: dict[int, tuple[object, object]] = {}
        """By id of a container of the state: the container, kept alive, and its saved content."""
        self._growing: list[_Growing] = []

    def add(self, node: object, path: str, given: Setter) -> bool:
        """Plans to fill a container with what was saved whole in its place. Returns whether something was; if not, its
        entries are visited.

        `given`: puts another one in its place, if it cannot be filled.
        """
        if not self._stands_whole(path, given) or not self._plan.wanted(path, whole=True):
            if isinstance(node, MutableMapping):
                self._growing.append(_Growing(node, path))
            return False
        value = self._plan.take_value(path)

        def fill() -> None:
            now = self._become(node, value, _is_alike(node, value))
            if now is not node and given is not None:
                given(now)

        self._plan.then(fill)
        return True

    def _stands_whole(self, path: str, given: Setter) -> bool:
        name = self._plan.named(path)
        saved = self._plan.saved.values_at(name)
        if name not in saved:
            return False
        return values.is_nest(saved[name]) or (given is not None and is_plain_value(name, saved[name]))

    def add_plain(self, path: str, given: Setter) -> bool:
        """Plans to replace a value by the dict saved in its place, by entries. Returns whether there may be one."""
        name, saved = self._plan.named(path), self._plan.saved
        if given is None or name in saved.values_at(name) or not self._plan.wanted(path) or not saved.below(name):
            return False
        self._growing.append(_Growing({}, path, given))
        return True

    def _become(self, node: object, value: Any, alike: bool) -> object:
        """Returns a container with the saved content: this one, if it can be changed and is `alike`."""
        if isinstance(node, tuple) and alike and not isinstance(node, torch.Size):  # which holds nothing to fill
            return tuple(self._items(node, value))
        if not alike or not isinstance(node, (list, MutableMapping)):
            return value
        if id(node) in self._filled:  # it occurs in two places, as in [[]] * 2
            _, first = self._filled[id(node)]
            return node if _text(first) == _text(value) else value
        self._filled[id(node)] = node, value
        if isinstance(node, list):
            node[:] = self._items(node, value)
        else:
            entries = [(k, self._inner(node[k], v) if k in node else v) for k, v in value.items()]
            node.clear()
            for key, entry in entries:  # not by update(): that of a Counter adds
                node[key] = entry
        return node

    def _items(self, node: list[object] | tuple[object, ...], value: list[object] | tuple[object, ...]) -> list[object]:
        return [*map(self._inner, node, value), *value[len(node) :]]

    def _inner(self, node: object, value: object) -> object:
        return self._become(node, value, type(node) is type(value))

    def grow(self) -> None:
        """Plans to give dicts the saved entries that they lack and that were not taken. Call it after all was visited.

        Only if all keys on the way can only be text: keys of earlier versions may have been numbers, and entries of a
        list have numbers, too.
        """
        for node, path, given in self._growing:
            grown = [rest for rest in self._plan.saved.below(self._plan.named(path)) if self._grow(node, path, rest)]
            if given is None:
                continue
            if grown:
                self._plan.then(partial(given, node))
            else:
                self._plan.add_value(path, given)

    def _grow(self, node: MutableMapping[Any, Any], path: str, rest: str) -> bool:
        plan, keys, full = self._plan, [*map(key_of, rest.split("/"))], f"{path}/{rest}"
        name = plan.named(full)
        if keys[0] in node or not all(map(is_text, keys)):
            return False
        if name != f"{plan.named(path)}/{rest}" or plan.is_used(name) or self._in_object(name):
            return False
        saved = plan.saved.values_at(name)[name]
        if not is_plain_value(name, saved) or is_extra_state(keys[-1]) or not plan.wanted(full):
            return False
        value = plan.take_value(full)

        def put() -> None:
            at = node
            for key in keys[:-1]:
                at = at.setdefault(key, {})
            at[keys[-1]] = value

        plan.then(put)
        return True

    def _in_object(self, name: str) -> bool:
        """Returns whether it is a part of an object, which is loaded as a whole."""
        while name:
            if name in self._plan.saved.objects:
                return True
            name = name.rpartition("/")[0]
        return False


def _is_alike(node: object, value: object) -> bool:
    """Returns whether a container of the state can hold the saved content: it stays a list or dict of its own kind."""
    if isinstance(node, MutableMapping):
        return isinstance(value, dict)
    return isinstance(node, (list, tuple)) and isinstance(value, (list, tuple))


def _text(value: object) -> bytes:
    return values.dumps(values.encode(value, ""))
