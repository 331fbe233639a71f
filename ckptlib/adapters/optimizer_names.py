"""Optimizer states by parameter names, as `get_optimizer_state_dict` returns them, from a step that has another form:
an optimizer saved as it is, or `optimizer.state_dict()` with the names beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckptlib.errors import StateMismatch
from ckptlib.exporting.dcp_files import StandIns, name_parameters
from ckptlib.format import values
from ckptlib.format.paths import join, key_of
from ckptlib.reading.nested import nested
from ckptlib.reading.opened import CheckpointReader

Node = dict[str, Any]
STATE, GROUPS, PARAMS, NAMES = "state", "param_groups", "params", "param_names"


def named_optimizers(states: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Node]]:
    """Yields path and dict of states with parameter names, nested or flat (`flatten_optimizer_state_dict`)."""
    for key, node in states.items():
        below = join(path, key)
        if not isinstance(node, dict):
            continue
        if _is_nested(node) or _is_flat(node):
            yield below, node
        else:
            yield from named_optimizers(node, below)


def _is_nested(node: Node) -> bool:
    state, groups = node.get(STATE), node.get(GROUPS)
    if not isinstance(state, dict) or not isinstance(groups, list) or not groups:
        return False
    params = [group.get(PARAMS) if isinstance(group, dict) else None for group in groups]
    return all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in params)


def _is_flat(node: Node) -> bool:
    """Returns whether its keys are like state.net.0.weight.exp_avg and param_groups.net.0.weight.lr."""
    return bool(node) and all(isinstance(key, str) and key.startswith((f"{STATE}.", f"{GROUPS}.")) for key in node)


@dataclass
class Wanted:
    """The entries to fill in one or several optimizers' states."""

    tensors: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Tensors to fill, by name in the checkpoint."""
    values: list[tuple[Node, str, object]] = field(default_factory=list)
    """Where each plain value goes: a dict, its key, and the value."""
    missing: list[str] = field(default_factory=list)
    """Names that the checkpoint lacks."""

    def put(self) -> None:
        """Puts plain values where they belong."""
        for node, key, value in self.values:
            node[key] = value


class SavedOptimizers:
    """The optimizers of an opened step, by parameter names."""

    def __init__(self, opened: CheckpointReader) -> None:
        self._stand_ins = StandIns(opened)
        self._tree = nested(self._stand_ins)
        self._filled: dict[int, object] = {}
        """Values with their tensors read, by id of the value in the tree."""
        for path, described in opened.trees.items():
            if isinstance(described, dict) and "optimizer" in described:
                name_parameters(self._tree, path)

    def want(self, path: str, node: Node, wanted: Wanted) -> None:
        """Adds what fills `node`. Raises StateMismatch if the step has no names, or other groups."""
        saved = self._by_name(path)
        if saved is None:
            wanted.missing.append(path)
            return
        if _is_flat(node):
            for key, value in node.items():
                self._want(saved, key, value, node, key, join(path, key), wanted)
            return
        for name, entries in node[STATE].items():
            for key, value in entries.items():
                full = join(join(join(path, STATE), name), key)
                self._want(saved, f"{STATE}.{name}.{key}", value, entries, key, full, wanted)
        for i, group in enumerate(node[GROUPS]):
            for key in [key for key in group if key not in (PARAMS, NAMES)]:
                found = [flat for name in group[PARAMS] if (flat := f"{GROUPS}.{name}.{key}") in saved]
                if any(self._told(saved[flat]) != self._told(saved[found[0]]) for flat in found):
                    raise StateMismatch(
                        f"{path}: group {i} of the state dict has parameters that were in several groups, with "
                        f"different {key}; make the optimizer's groups as they were"
                    )
                if found:
                    full = join(join(join(path, GROUPS), i), key)
                    self._want(saved, found[0], group[key], group, key, full, wanted)

    def _want(
        self, saved: Mapping[str, object], flat: str, now: object, node: Node, key: str, name: str, wanted: Wanted
    ) -> None:
        if flat not in saved:
            wanted.missing.append(name)
            return
        source = self._stand_ins.saved_as(saved[flat])
        if source is None:
            wanted.values.append((node, key, self._read(saved[flat])))
        elif isinstance(now, torch.Tensor):
            wanted.tensors.setdefault(source, []).append(now)
        else:
            raise StateMismatch(f"{name}: is a plain value in the state dict; the checkpoint has a tensor")

    def _told(self, value: object) -> object:
        """Returns a form to compare: a tensor's name, or a value as encoded. A NaN does not equal itself, and comparing
        arrays gives no single answer."""
        if isinstance(value, (list, tuple)):
            return [*map(self._told, value)]
        if isinstance(value, Mapping):
            return {key: self._told(item) for key, item in value.items()}
        source = self._stand_ins.saved_as(value)
        return values.encode(value, GROUPS) if source is None else source

    def _read(self, value: object) -> object:
        """Returns a value with its tensors read, such as betas: one object for all parameters of a group."""
        if id(value) not in self._filled:
            self._filled[id(value)] = self._stand_ins.filled(value)
        return self._filled[id(value)]

    def _by_name(self, path: str) -> dict[str, object] | None:
        """Returns flat entries: state.<parameter>.<key>, param_groups.<parameter>.<option>; None without optimizer."""
        node: Any = self._tree
        numbered = False
        for segment in path.split("/"):
            node = node.get(key_of(segment)) if isinstance(node, dict) else None
        if not isinstance(node, dict):
            return None
        state, groups = node.get(STATE, {}), node.get(GROUPS)
        groups = groups.get("value") if isinstance(groups, dict) else groups  # version 0.2 saved lists so
        if not isinstance(groups, list):
            return None
        names: dict[str, str] = {}
        for group in groups:
            given: Sequence[object] = group.get(NAMES) or group[PARAMS]
            names.update(zip(map(str, group[PARAMS]), map(str, given), strict=True))
            numbered |= any(isinstance(name, int) or str(name).startswith("@") for name in given)
        if numbered:
            raise StateMismatch(
                f"{path}: the state dict names parameters, and the checkpoint has them by position alone: it was saved "
                "from optimizer.state_dict(), or without the optimizer's module. Load it into optimizer.state_dict() "
                "and give that to optimizer.load_state_dict(). To have names, save the optimizer beside its module, or "
                "get_optimizer_state_dict(model, optimizer), or make it of model.named_parameters()"
            )
        entries = {str(i): entry for i, entry in enumerate(state)} if isinstance(state, list) else state
        found: dict[str, object] = {}
        for param, entry in entries.items():
            found |= {f"{STATE}.{names.get(param, param)}.{key}": value for key, value in entry.items()}
        for group in groups:
            options = {key: value for key, value in group.items() if key not in (PARAMS, NAMES)}
            for param in map(str, group[PARAMS]):
                found |= {f"{GROUPS}.{names[param]}.{key}": value for key, value in options.items()}
        return found
