"""Reads a whole step, or a part of it, as plain dicts: nested as it was saved, without the classes of the state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from ckptlib.errors import FormatError, StateMismatch
from ckptlib.format import tagged_values
from ckptlib.format.paths import join, key_of
from ckptlib.format.values import Json
from ckptlib.policy.patterns import Patterns, patterns_of
from ckptlib.reading.opened import open
from ckptlib.reading.rank_values import RankValues, Value

Leaves = dict[str, Any]
"""Tensors and values by name."""


class Step(Protocol):
    """The properties of an opened step from which its nesting follows."""

    @property
    def step(self) -> int: ...

    @property
    def values(self) -> Mapping[str, object]: ...

    @property
    def trees(self) -> Mapping[str, Json]: ...

    def keys(self) -> list[str]: ...

    def groups(self, path: str) -> dict[str, int]: ...

    def get_tensors(self, names: Sequence[str]) -> dict[str, Any]: ...


def read(
    url: str | Path,
    step: int | str = "latest",
    only: str | Sequence[str] | None = None,
    *,
    framework: str | None = None,
    rank: int = 0,
    storage_options: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Returns a committed step as nested dicts of tensors and plain values, without a state to be filled.

        model.load_state_dict(ckptlib.read(url, only="model")["model"])

    Modules are flat dicts by parameter name; objects are what their `state_dict()` gave; an optimizer is a dict of
    `state`, by name of parameter, and `param_groups`, whose `params` are names. Random generators are under "@rng".
    Containers of plain values are what they were. A list or tuple of the state itself that holds tensors comes back as
    a list; so does a dict of tensors with the keys 0, 1, 2 and so on, since both have the same names. Tensor subclasses
    come back as dicts of the tensors that they are made of.

    Reads in parallel, into memory of the size of the result and some buffers. Every chunk is compared with its digest.

    only: names, path prefixes or patterns (fnmatch) as for `ckptlib.load`, such as "model" or "model/layers.*". What
          lies in an object, of which only a part is named, stands under its name.

    The other arguments, and what it raises, are those of `ckptlib.open`; also StateMismatch if `only` matches nothing.
    """
    with open(url, step, framework, rank=rank, storage_options=storage_options) as opened:
        return nested(opened, only)


def nested(opened: Step, only: str | Sequence[str] | None = None) -> dict[str, Any]:
    """Returns what `read` returns, for an opened step."""
    names, values = opened.keys(), opened.values
    patterns = None if only is None else _patterns(patterns_of("only", only), [*names, *values, *opened.trees], opened)
    children = _children([*names, *values, *opened.trees])
    given = {name for name in values if _wanted(patterns, name)}
    # The hyper-parameters of a group, which is in an object, may have tensors beside them. Any other value with names
    # below it is of a rank that had no more there: these names are of other ranks.
    over = {name for name in given if children(name) and not _is_below(opened.trees, name)}
    under = _children([*given])
    hidden = {
        name for name in names if name in given or (name and under(name)) or _is_below(over, name)
    }  # of other ranks
    wanted = [name for name in names if _wanted(patterns, name) and name not in hidden]
    leaves: Leaves = opened.get_tensors(wanted)
    leaves.update((name, values[name]) for name in values if name in given)
    root: dict[str, Any] = {}
    done: set[str] = set()
    trees = RankValues({p: tree for p, tree in opened.trees.items() if p not in given and not _is_below(over, p)})
    held = RankValues(leaves)
    for path in trees.names:
        whole = _wanted(patterns, path) or _wanted(patterns, f"{path}/")
        if whole and not _is_below(done, path) and not _is_subclass(trees.values[path]):
            _put(root, path, _assembled(trees, path, held, opened.groups(path)))
            done.add(path)
    for name, leaf in leaves.items():
        if name not in done and not _is_below(done, name):
            _put(root, name, leaf)
    done.update(name for name, leaf in leaves.items() if isinstance(leaf, dict))  # values stay as they were
    return cast("dict[str, Any]", _with_lists(root, children, done, ""))


def _wanted(patterns: Patterns | None, name: str) -> bool:
    return patterns is None or bool(patterns.covering(name))


def _is_below(paths: Container[str], name: str) -> bool:
    """Returns whether a name is below any of these paths, of which there may be thousands."""
    while name := name.rpartition("/")[0]:
        if name in paths:
            return True
    return False


def _patterns(asked: Sequence[str], names: Sequence[str], opened: Step) -> Patterns:
    """Returns the patterns. Raises StateMismatch if one matches nothing."""
    patterns, met = Patterns(asked), set[str]()
    for name in names:
        met |= patterns.covering(name) | patterns.covering(f"{name}/")
    if idle := [pattern for pattern in asked if pattern not in met]:
        tops = sorted({name.partition("/")[0] for name in names})
        raise StateMismatch(
            f"only={', '.join(map(repr, idle))}: step {opened.step} has nothing of that name; at its top are "
            f"{', '.join(tops[:20])}"
        )
    return patterns


def _is_subclass(tree: Json) -> bool:
    return isinstance(tree, dict) and "subclass" in tree


def _put(root: dict[str, Any], name: str, leaf: object) -> None:
    """Puts a leaf into nested dicts. Raises FormatError if something else is in the way, which no save makes."""
    *above, last = map(key_of, name.split("/"))
    at = root
    for segment in above:
        at = at.setdefault(segment, {})
        if not isinstance(at, dict):
            raise FormatError(f"{name[:80]}: lies below a name that is a tensor's or a value's")
    if at.setdefault(last, leaf) is not leaf:
        raise FormatError(f"{name[:80]}: the checkpoint has two things of this name")


def _below(leaves: RankValues[Value], path: str) -> dict[str, Value]:
    return {name: leaves.values[f"{path}/{name}"] for name in leaves.below(path)}


def _nest(leaves: Leaves) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, leaf in leaves.items():
        _put(found, name, leaf)
    return found


def _assembled(trees: RankValues[Json], path: str, leaves: RankValues[Any], groups: Mapping[str, int]) -> object:
    """Returns the state of an object, built by its tree. `groups`: an optimizer's groups by parameter name."""
    tree = trees.values[path]
    if isinstance(tree, dict) and "optimizer" in tree:
        return _optimizer(groups, _with_objects(_below(trees, path), _below(leaves, path)))
    return _rebuilt(tree, path, leaves, 0)


def _with_objects(trees: Mapping[str, Json], leaves: Leaves) -> Leaves:
    """Returns leaves of an optimizer, with lists and tuples, such as betas of tensors, in place of their entries."""
    found: Leaves = {}
    inside: dict[str, Leaves] = {}
    for name, leaf in leaves.items():
        path = next((name[:at] for at, sign in enumerate(name) if sign == "/" and name[:at] in trees), None)
        if path is None:
            found[name] = leaf
        else:
            inside.setdefault(path, {})[name] = leaf
    for path, held in inside.items():
        try:
            found[path] = _rebuilt(trees[path], path, RankValues(held), 0)
        except StateMismatch:  # it is the tree of another rank, which has these tensors as its own
            found.update(held)
    return found


def _rebuilt(tree: Json, path: str, leaves: RankValues[Any], depth: int) -> object:
    if depth > tagged_values.MAX_DEPTH:
        raise FormatError(f"{path[:80]}: the layout's tree of this object is deeper than its limit")
    match tree:
        case "tensor" | "value":
            if path not in leaves.values:
                raise StateMismatch(f"{path}: the checkpoint has this for other ranks alone, or not at all: see rank=")
            return leaves.values[path]
        case {"dict": list(pairs)}:
            return dict(_pairs(pairs, path, leaves, depth))
        case {"odict": list(pairs)}:
            return OrderedDict(_pairs(pairs, path, leaves, depth))
        case {"list": list(items)}:
            return [_rebuilt(item, f"{path}/{i}", leaves, depth + 1) for i, item in enumerate(items)]
        case {"tuple": list(items)}:
            return tuple(_rebuilt(item, f"{path}/{i}", leaves, depth + 1) for i, item in enumerate(items))
        case {"subclass": dict()}:
            return _nest(_below(leaves, path))
    raise FormatError(f"{path[:80]}: the layout's tree of this object cannot be read: {tagged_values.brief(tree)}")


def _pairs(pairs: list[Json], path: str, leaves: RankValues[Any], depth: int) -> list[tuple[Any, object]]:
    entries = tagged_values.decode_entries(pairs, path, depth)
    return [(key, _rebuilt(cast(Json, tree), name, leaves, depth + 1)) for key, name, tree in entries]


def _optimizer(groups: Mapping[str, int], below: Leaves) -> dict[str, Any]:
    """Returns an optimizer's state of each parameter, by name, and its groups. `below`: everything saved of it."""
    state: dict[str, Any] = {}
    options: dict[int, dict[str, Any]] = {}
    for name, leaf in below.items():
        head, _, rest = name.partition("/")
        number = head.removeprefix("@group.")
        if head.startswith("@group.") and number.isdecimal() and len(number) < 10:
            options.setdefault(int(number), {})
            if rest:
                _put(options[int(number)], rest, leaf)
            elif isinstance(leaf, dict):
                options[int(number)].update(leaf)
            continue
        param = _owner(name, groups)
        _put(state.setdefault(param, {}), name[len(param) + 1 :], leaf)
    of_groups: dict[int, list[str]] = {index: [] for index in sorted({*options, *groups.values()})}
    for name, index in groups.items():
        of_groups[index].append(name)
    return {
        "state": state,
        "param_groups": [{**options.get(index, {}), "params": names} for index, names in of_groups.items()],
    }


def _owner(name: str, params: Mapping[str, int]) -> str:
    """Returns the parameter that an entry of an optimizer's state belongs to."""
    param = name.rpartition("/")[0]
    while param and param not in params:
        param = param.rpartition("/")[0]
    return param or name.rpartition("/")[0] or name


def _children(names: Sequence[str]) -> Callable[[str], set[str]]:
    """Returns a function from a path to the segments that follow it in the checkpoint, whatever part was asked for."""
    found: dict[str, set[str]] = {}
    for name in names:
        path = name
        while path:
            path, _, segment = path.rpartition("/")
            known = found.setdefault(path, set())
            if segment in known:
                break
            known.add(segment)
    return lambda path: found.get(path, set())


def _with_lists(node: object, children: Callable[[str], set[str]], done: Container[str], path: str) -> object:
    """Returns the same node with lists where the saved names were numbers from 0 on."""
    if not isinstance(node, dict) or path in done:
        return node
    saved = children(path)
    inner = {}
    for key, value in node.items():
        inner[key] = _with_lists(value, children, done, join(path, key))
    numbered = path and saved and saved == {str(i) for i in range(len(saved))} == set(node)
    return [inner[str(i)] for i in range(len(saved))] if numbered else inner
