"""Containers of plain values that grow: a load gives them what they had when they were saved, in place.

Those that were saved whole, see `ckptlib.state.nests`, become what they were. Dicts by text, whose entries have
names of their own, get the entries that they lack.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import MutableMapping
from functools import cached_property, partial
from itertools import islice, takewhile
from keyword import iskeyword
from typing import Any, NamedTuple

from ckptlib.format import values
from ckptlib.loading.load_plan import LoadPlan, Setter, is_plain_value
from ckptlib.reading.nested import key_of
from ckptlib.state.wrappers import is_extra_state


class Growing(NamedTuple):
    """A dict of the state that gets saved entries."""

    node: MutableMapping[Any, Any]
    path: str
    given: Setter
    """Of a new one: puts it in the place of None."""


class NestTargets:
    """Adds containers that hold nothing but plain values to a plan."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._filled: dict[int, tuple[object, object]] = {}
        """By id of a container of the state: itself, kept alive, and the saved one that it has become."""
        self._growing: list[Growing] = []

    def add(self, node: object, path: str, given: Setter) -> bool:
        """Has a container become the one that was saved whole. Returns whether one was; else its entries are visited.

        `given`: puts another one in its place, where it cannot be filled.
        """
        saved = self._plan.saved.values.get(self._plan.named(path))
        if not values.is_nest(saved) or not self._plan.wanted(path, whole=True):
            if isinstance(node, MutableMapping):
                self._growing.append(Growing(node, path, None))
            return False
        value = self._plan.take_value(path)

        def fill() -> None:
            now = self._become(node, value, _is_alike(node, value))
            if now is not node and given is not None:
                given(now)

        self._plan.then(fill)
        return True

    def add_none(self, path: str, given: Setter) -> bool:
        """Has a None, such as a best that there is not yet, become the dict by text that was saved in its place.

        Returns whether the checkpoint may have one: entries below the path, and nothing at it.
        """
        saved, name = self._plan.saved, self._plan.named(path)
        at_it = name in saved.values or name in saved.tensors or name in saved.objects
        if given is None or at_it or not self._below(name):
            return False
        self._growing.append(Growing({}, path, given))
        return True

    def _become(self, node: object, value: Any, alike: bool) -> object:
        """The container with the saved content: the same one, where it can be changed and is `alike`."""
        if isinstance(node, tuple) and alike:
            return tuple(self._items(node, value))
        if not alike or not isinstance(node, (list, MutableMapping)):
            return value
        if id(node) in self._filled:  # it stands in two places, as in [[]] * 2
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
        """Has dicts get the saved entries that they lack and nobody else took. To be called once all was visited.

        Only where all keys on the way were text for sure: those of earlier versions may have been numbers, and what was
        a list has numbers, too.
        """
        for node, path, given in self._growing:
            grown = [self._grow(node, path, rest) for rest in self._below(self._plan.named(path))]
            if given is not None and any(grown):
                self._plan.then(partial(given, node))
            elif given is not None:
                self._plan.add_value(path, given)

    def _grow(self, node: MutableMapping[Any, Any], path: str, rest: str) -> bool:
        """Whether it gets this one."""
        plan, keys, full = self._plan, [*map(key_of, rest.split("/"))], f"{path}/{rest}"
        name = plan.named(full)
        if keys[0] in node or not all(map(_was_text, keys)):
            return False
        if name != f"{plan.named(path)}/{rest}" or plan.is_used(name) or self._in_object(name):
            return False
        if not is_plain_value(name, plan.saved.values[name]) or is_extra_state(keys[-1]) or not plan.wanted(full):
            return False
        value = plan.take_value(full)

        def put() -> None:
            at = node
            for key in keys[:-1]:
                at = at.setdefault(key, {})
            at[keys[-1]] = value

        plan.then(put)
        return True

    def _below(self, name: str) -> list[str]:
        """The names of saved values below a name, without it, in the order that they were saved in."""
        head, names = f"{name}/", self._names
        found = takewhile(lambda saved: saved.startswith(head), islice(names, bisect_left(names, head), None))
        return [saved[len(head) :] for saved in sorted(found, key=self._positions.__getitem__)]

    @cached_property
    def _names(self) -> list[str]:
        return sorted(self._plan.saved.values)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: at for at, name in enumerate(self._plan.saved.values)}

    def _in_object(self, name: str) -> bool:
        """Whether it is a part of an object, which is put back as a whole."""
        while name:
            if name in self._plan.saved.objects:
                return True
            name = name.rpartition("/")[0]
        return False


def _was_text(key: str) -> bool:
    """Whether no other key than text gives this one: "val/loss" and "top-1" are text, "7", "(1, 2)" and "None" may not
    have been."""
    return (key[:1].isalpha() or key[:1] == "_") and not iskeyword(key) and "'" not in key and '"' not in key


def _is_alike(node: object, value: object) -> bool:
    """Whether a container of the state can hold what was saved: it stays the kind of list or dict that it is."""
    if isinstance(node, MutableMapping):
        return isinstance(value, dict)
    return isinstance(node, (list, tuple)) and isinstance(value, (list, tuple))


def _text(value: object) -> bytes:
    return values.dumps(values.encode(value, ""))
