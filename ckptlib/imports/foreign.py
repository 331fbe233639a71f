"""A foreign checkpoint: named tensors and values of another library, ready to be saved as a step.

The readers of formats add to it; the ordinary save takes `Foreign.flat`. Tensors are views of mapped files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from ckptlib.errors import FormatError, UnsupportedState
from ckptlib.format import values
from ckptlib.format.box import Box, Effort, find_hole
from ckptlib.format.layout import ByHand
from ckptlib.format.paths import join
from ckptlib.format.tagged_values import MAX_DEPTH
from ckptlib.format.values import Json
from ckptlib.imports.mapped import numel_of
from ckptlib.imports.torch_file import Strange
from ckptlib.policy.patterns import covers
from ckptlib.state.collector import Flat, has_tensor
from ckptlib.state.leaf import Leaf, Plain, dtype_name, identity, refuse_tensor
from ckptlib.state.optimizers import group_path, state_path

MAX_NODES = 10_000_000
"""The most items in all containers. A pickle of a few hundred bytes can name one list so often that it has 2**100."""

MAX_SHOWN = 8

WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and DistributedDataParallel put before every name of a module."""


@dataclass
class Foreign:
    """The tensors and values of a foreign checkpoint, which one reader adds."""

    kind: str
    """The library that wrote it, for people."""
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    params: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Names of an optimizer's parameters, in the order that it was given them, by path of the optimizer."""
    step: int | None = None
    """The step, if the source tells it."""
    notes: list[str] = field(default_factory=list)
    """Notes for people about what was imported."""
    leaves: dict[str, Leaf] = field(default_factory=dict)
    plain: dict[str, Json] = field(default_factory=dict)
    objects: dict[str, Json] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    _cut: dict[int, tuple[torch.Tensor, Sequence[tuple[Box, torch.Tensor]]]] = field(default_factory=dict)
    """By id of a meta tensor that stands for a tensor in boxes: itself, and the boxes."""
    _seen: dict[object, str] = field(default_factory=dict)
    _strange: dict[str, str] = field(default_factory=dict)
    """Class of each object that means nothing without its class, by name."""
    _lost: dict[str, str] = field(default_factory=dict)
    """By name of such an object: the name of the value that it is part of, which is not imported."""
    _nodes: int = 0
    _effort: Effort = field(default_factory=Effort)

    @property
    def flat(self) -> Flat:
        """Everything, for the save. Raises UnsupportedState for objects that mean nothing without their class."""
        if self._strange:
            tops = sorted({name.split("/")[0] for name in self._strange})
            skips = " ".join(f"--skip '{name}'" for name in tops[:MAX_SHOWN])
            raise _unsupported(self._strange, skips)
        if not self.leaves and not self.plain:
            raise FormatError(f"{self.kind}: nothing to import; see only= and skip=")
        return Flat(list(self.leaves.values()), dict(self.plain), dict(self.objects))

    def leave_out_strange(self, asked: Iterable[str]) -> None:
        """Leaves out objects that mean nothing without their class, and the values that they are part of; notes it.

        `asked`: the names that a load fills. Raises UnsupportedState if such a value is at, above or below one.
        """
        if not self._strange:
            return
        names = set(asked)
        around = {path for name in names for path in _paths_to(name)}
        used = {
            name: by
            for name, by in self._strange.items()
            if self._lost[name] in around or not names.isdisjoint(_paths_to(self._lost[name]))
        }
        if used:
            raise _unsupported(used, "init_only=")
        self.notes.append(f"{_shown(self._strange)}: objects of classes, which the state has no use for, are left out")
        self._strange.clear()

    def wanted(self, name: str) -> bool:
        """Returns whether the caller asked for a name; records names that are left out."""
        asked = not self.only or any(covers(pattern, name) for pattern in self.only)
        if asked and not any(covers(pattern, name) for pattern in self.skip):
            return True
        self.left_out.append(name)
        return False

    # What readers add

    def in_boxes(
        self, dtype: torch.dtype, shape: tuple[int, ...], pieces: Sequence[tuple[Box, torch.Tensor]]
    ) -> torch.Tensor:
        """Returns a tensor that stands, in a tree, for one that the source has in boxes."""
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        self._cut[id(tensor)] = tensor, pieces
        return tensor

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Adds a whole tensor, or one that stands for a tensor in boxes."""
        if id(tensor) in self._cut:
            self._add_pieces(name, tensor, self._cut[id(tensor)][1])
            return
        if not self.wanted(name):
            return
        self._claim(name)
        refuse_tensor(tensor, name)
        first = self._seen.setdefault(identity(tensor), name) if tensor.numel() else name
        shape = tuple(tensor.shape)
        pieces = ((Box.whole(shape), tensor),) if tensor.numel() else ()
        leaf = Leaf(name, dtype_name(tensor), shape, Plain(), pieces, None)
        self.leaves[name] = leaf if first == name else replace(leaf, tied=first)

    def _add_pieces(self, name: str, like: torch.Tensor, pieces: Sequence[tuple[Box, torch.Tensor]]) -> None:
        """Adds a tensor in boxes. Raises FormatError unless the boxes cover it exactly."""
        if not self.wanted(name):
            return
        self._claim(name)
        dtype, shape = dtype_name(like), tuple(like.shape)
        kept = [(box, tensor) for box, tensor in dict(pieces).items() if box.numel]
        if any(len(box.shape) != len(shape) or not box.within(Box.whole(shape)) for box, _ in kept):
            raise FormatError(f"{name}: a shard that is not inside of the tensor's shape {list(shape)}")
        have = sum(box.numel for box, _ in kept)
        if have != numel_of(shape):
            raise FormatError(
                f"{name}: the source has {have} of its {numel_of(shape)} elements; is a file of another rank missing, "
                "or are there two shards of one place?"
            )
        if any(tensor.dtype != like.dtype or tuple(tensor.shape) != box.shape for box, tensor in kept):
            raise FormatError(f"{name}: a shard of another shape or dtype than the source's metadata says")
        hole = find_hole(Box.whole(shape), [box for box, _ in kept], self._effort)
        if hole is not None:
            raise FormatError(f"{name}: the source has nothing for {hole}, and elsewhere two shards of one place")
        held = Plain() if len(kept) <= 1 else ByHand()
        self.leaves[name] = Leaf(name, dtype, shape, held, tuple(kept), None)

    def add_alias(self, name: str, first: str) -> None:
        """Adds another name of a tensor that was added."""
        if first in self.leaves and self.wanted(name):
            self._claim(name)
            self.leaves[name] = replace(self.leaves[first], name=name, tied=self.leaves[first].tied or first)

    def add_value(self, name: str, value: object) -> None:
        """Adds one plain value, which may be a container of plain values."""
        if not self.wanted(name):
            return
        self._claim(name)
        strange = dict(self._strange_in(value, name, 0))
        self._strange.update(strange)
        self._lost.update(dict.fromkeys(strange, name))
        if not strange:
            self.plain[name] = values.encode(value, name)

    def add_tree(self, node: object, path: str) -> None:
        """Adds anything that a library keeps under a name: modules and optimizers by their form, containers without
        tensors as one value."""
        self._count(1)
        if isinstance(node, torch.Tensor):
            self.add_tensor(path, node)
        elif isinstance(node, Mapping) and is_optimizer(node):
            self.add_optimizer(node, path)
        elif isinstance(node, (Mapping, list, tuple)) and has_tensor(node):
            items = node.items() if isinstance(node, Mapping) else enumerate(node)
            for key, inner in items:
                if not self.is_object(key, path):
                    self.add_tree(inner, join(path, key))
        else:
            self.add_value(path, node)

    def add_module(self, state: Mapping[Any, Any], path: str) -> None:
        """Adds the result of a module's state_dict()."""
        prefix = ""
        while wrapper := next((w for w in WRAPPERS if _all_begin(state, prefix + w)), None):
            prefix += wrapper
        if prefix:
            self.notes.append(f"{path}: {prefix!r}, which a wrapper put before every name, is left out of the names")
        for key, value in state.items():
            self.add_tree(value, f"{path}/{str(key)[len(prefix) :]}")

    def add_optimizer(self, state: Mapping[Any, Any], path: str) -> None:
        """Adds the result of an optimizer's state_dict(), by parameter, named or numbered."""
        groups, entries = state["param_groups"], state["state"]
        assert isinstance(groups, (list, tuple))
        assert isinstance(entries, Mapping)
        if not self.wanted(path):
            return
        ids = [list(group["params"]) for group in groups]
        names = self._names(path, ids)
        described: list[Json] = [[names[i] for i in group] for group in ids]
        for number, entry in entries.items():
            if not isinstance(entry, Mapping) or number not in names:
                raise FormatError(f"{path}: state of the parameter {str(number)[:80]!r}, which is in no group")
            for key, value in entry.items():
                if not self.is_object(key, f"{path}/{names[number]}"):
                    self._add_entry(value, state_path(path, names[number], str(key)))
        for i, group in enumerate(groups):
            plain = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for key in [key for key, value in plain.items() if has_tensor(value)]:
                value = plain.pop(key)
                if not self.is_object(key, group_path(path, i)):
                    self._add_entry(value, join(group_path(path, i), key))
            self.add_value(group_path(path, i), plain)
        self.objects[path] = {"optimizer": {"groups": described}}

    def _add_entry(self, value: object, name: str) -> None:
        """Adds an entry of an optimizer's state, or an option of a group: a tensor, a plain value, or a container of
        tensors, which comes back as it was."""
        if isinstance(value, (dict, list, tuple)) and has_tensor(value):
            if self.wanted(name):
                self.objects[name] = self._tree(value, name, 0)
        else:
            self.add_tree(value, name)

    def _tree(self, node: object, name: str, depth: int) -> Json:
        self._count(1)
        if depth > MAX_DEPTH:
            raise FormatError(f"{name[:200]}: nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, torch.Tensor):
            self.add_tensor(name, node)
            return "tensor"
        if not isinstance(node, (dict, list, tuple)) or not has_tensor(node):
            self.add_value(name, node)
            return "value"
        if isinstance(node, dict):
            values.require_spread(node, name)
            kind = "odict" if isinstance(node, OrderedDict) else "dict"
            pairs = [
                (values.encode(key, name), self._tree(inner, join(name, key), depth + 1))
                for key, inner in node.items()
                if not self.is_object(key, name)
            ]
            return {kind: [[key, tree] for key, tree in pairs]}
        items: list[Json] = [self._tree(inner, join(name, i), depth + 1) for i, inner in enumerate(node)]
        return {"tuple" if isinstance(node, tuple) else "list": items}

    def _names(self, path: str, ids: list[list[object]]) -> dict[object, str]:
        """Returns the names of an optimizer's parameters: those given, its own, or positions."""
        flat = [number for group in ids for number in group]
        given = self.params.get(path)
        if given is not None:
            if len(given) != len(flat):
                raise FormatError(f"{path}: has {len(flat)} parameters, but params= names {len(given)}")
            return dict(zip(flat, given, strict=True))
        if flat and all(isinstance(number, str) for number in flat):
            home = self._home_of([str(number) for number in flat])
            return {number: join(home, number) if home else str(number) for number in flat}
        if len(flat) > 1:
            self.notes.append(
                f"{path}: its {len(flat)} parameters have no names in the source, only positions. Load it alone, "
                f"load(url, {{{path!r}: optimizer}}, strict=False), or import with params=, which names them"
            )
        return {number: f"@{i}.{j}" for i, group in enumerate(ids) for j, number in enumerate(group)}

    def _home_of(self, names: list[str]) -> str:
        """Returns the path of the only module that has parameters of all these names; "" if there is no only one."""
        last = names[-1]
        homes = [name[: -len(last) - 1] for name in self.leaves if name.endswith(f"/{last}")]
        fitting = [home for home in homes if all(f"{home}/{name}" in self.leaves for name in names)]
        return fitting[0] if len(fitting) == 1 else ""

    def check_params(self) -> None:
        """Checks that moments have the shapes of the parameters they are named by. Raises FormatError."""
        for path in self.params:
            if path not in self.objects:
                raise FormatError(f"params= names {path!r}, where the source has no optimizer; it has {self._paths()}")
            prefix = f"{path}/"
            for name, leaf in self.leaves.items():
                param, _, key = name[len(prefix) :].rpartition("/")
                if not name.startswith(prefix) or key not in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                    continue
                if param not in self.leaves:
                    raise FormatError(f"params= names {param!r}, which the source does not have under that name")
                if self.leaves[param].shape != leaf.shape:
                    raise FormatError(
                        f"{name}: is {list(leaf.shape)}, but {param} is {list(self.leaves[param].shape)}; params= must "
                        "have the order in which the optimizer was given its parameters"
                    )

    def _paths(self) -> str:
        return ", ".join(map(repr, self.objects)) or "none"

    def _claim(self, name: str) -> None:
        if name in self.leaves or name in self.plain or name in self._strange:
            raise FormatError(f"{self.kind}: has two entries that would both be called {name[:200]!r}")

    def is_object(self, key: object, path: str) -> bool:
        """Returns whether only unpickling could make a key, or a part of a key that is a tuple. Records it as "a key"
        below `path`, because the texts of several keys may look alike."""
        below = join(path, "a key")
        found = {} if isinstance(key, (str, int)) else dict(self._strange_in(key, below, 0))
        if found and self.wanted(below):
            self._strange.update(found)
            self._lost.update(dict.fromkeys(found, below))
        return bool(found)

    def _count(self, number: int) -> None:
        self._nodes += number
        if self._nodes > MAX_NODES:
            raise FormatError(f"{self.kind}: more than {MAX_NODES} values in containers")

    def _strange_in(self, node: object, path: str, depth: int) -> Iterator[tuple[str, str]]:
        self._count(1)
        if depth > 200:
            raise FormatError(f"{path[:200]}: nested deeper than 200 levels")
        if isinstance(node, Strange):
            yield path, node.by
        elif isinstance(node, Mapping):
            for key, value in node.items():
                yield from self._strange_in(key, join(path, "a key"), depth + 1)
                yield from self._strange_in(value, join(path, key), depth + 1)
        elif isinstance(node, (list, tuple, set, frozenset)):
            for i, item in enumerate(node):
                yield from self._strange_in(item, join(path, i), depth + 1)


def is_optimizer(node: Mapping[Any, Any]) -> bool:
    """Returns whether it has the form of a state of torch's optimizers."""
    groups = node.get("param_groups")
    return (
        isinstance(node.get("state"), Mapping)
        and isinstance(groups, (list, tuple))
        and all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups)
    )


def is_module(node: object) -> bool:
    """Returns whether it has the form of a module's state: names and tensors, and nothing else but extra states."""
    if not isinstance(node, Mapping) or not node:
        return False
    tensors = sum(isinstance(value, torch.Tensor) for value in node.values())
    extra = sum(isinstance(key, str) and key.rpartition(".")[2] == "_extra_state" for key in node)
    return tensors > 0 and tensors + extra >= len(node) and all(isinstance(key, str) for key in node)


def _unsupported(strange: Mapping[str, str], leave_out: str) -> UnsupportedState:
    """Returns the error for objects; `strange` names their classes. `leave_out`: how the caller leaves them out."""
    return UnsupportedState(
        f"{_shown(strange)}: objects of classes that only unpickling could make, which would run code; nothing was "
        f"unpickled. Leave them out ({leave_out}), or, if you trust the file, load it yourself with "
        "torch.load(..., weights_only=False), turn them into plain values and torch.save the result"
    )


def _shown(strange: Mapping[str, str]) -> str:
    some = [f"{name} ({by})" for name, by in list(strange.items())[:MAX_SHOWN]]
    return ", ".join(some) + (f" and {len(strange) - MAX_SHOWN} more" if len(strange) > MAX_SHOWN else "")


def _paths_to(name: str) -> Iterator[str]:
    """Yields the paths above a name, and the name itself."""
    return accumulate(name.split("/"), "{}/{}".format)


def _all_begin(state: Mapping[Any, Any], prefix: str) -> bool:
    return bool(state) and all(isinstance(key, str) and key.startswith(prefix) for key in state)
