"""Matches the hyper-parameters of an optimizer's groups: they go into the groups that hold the parameters now."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ckptlib.errors import StateMismatch
from ckptlib.format import values
from ckptlib.format.paths import join, key_of, segment_of
from ckptlib.loading.load_plan import LoadPlan
from ckptlib.loading.trees import maker, rebuild
from ckptlib.reading.saved_names import SavedGroup
from ckptlib.state.optimizers import group_path, hyper_parameters

OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "min_momentum", "swa_lr"}
"""Keys that torch's schedulers put into a group; a load may come before there is a scheduler, or without one."""

WHAT_ADAMW_IS = "decoupled_weight_decay"
"""The option by which AdamW differs from Adam, whose state it takes: torch's own load leaves it on, too."""


class GroupTarget(NamedTuple):
    """A group before it is filled."""

    alike: bool
    """Whether the optimizer is of the kind that was saved, as far as known."""
    options: dict[str, object]
    """The entries that the group will have."""


class GroupTargets:
    """Adds parameter groups to a plan."""

    def __init__(self, plan: LoadPlan) -> None:
        self._plan = plan
        self._saved = plan.saved
        self._options: dict[str, dict[str, dict[str, dict[str, str]]]] = {}
        """By path of an optimizer and number of a group: what `_saved_options` returns."""
        self._numbers: dict[int, tuple[torch.Tensor, float]] = {}
        """By id of an option that is a tensor: the tensor, kept alive, and the number that it was filled with."""

    def add(
        self,
        optimizer: torch.optim.Optimizer,
        group: dict[str, Any],
        index: int,
        path: str,
        origins: Collection[SavedGroup],
    ) -> GroupTarget:
        """Plans to give a group the hyper-parameters of the saved group that its parameters were in.

        `path` is the optimizer's, as it was saved; `origins` are those groups.

        The hyper-parameters reveal an optimizer of another kind: each side has some that the other lacks. One side
        alone may have more, unless its class is known to be another: a later torch adds some, and schedulers and users
        put theirs into a group. A class may have been renamed, and takes state of the classes that it inherits from.
        """
        now = dict(hyper_parameters(group))
        if not origins and not group["params"]:
            origins = {SavedGroup(0, index)}
        origin = min(origins, default=None)
        if origin is None or group_path(path, origin.index) not in self._saved.values_with(origin.layout):
            return GroupTarget(True, now)
        saved = self._saved_hyper_parameters(path, origin)
        own, where = self._saved_options(path, origin), partial(join, group_path(path, origin.index))
        keys: dict[str, Any] = {segment_of(key): key for key in now}
        options = {keys.get(segment, key_of(segment)): parts for segment, parts in own.items()}
        text = self._saved_text(path, origin)
        different = [o for o in origins if self._saved_text(path, o) != text or self._saved_options(path, o) != own]
        if different:
            self._plan.mismatch(
                f"{path}: group {index} holds parameters that were saved in groups {sorted({o.index for o in origins})}"
                " with different hyper-parameters; load them into groups that can be told apart"
            )
            return GroupTarget(True, now)
        told = {*saved, *options}
        defaults: dict[str, object] = getattr(optimizer, "defaults", {})  # one that never ran __init__ has none
        lacking, unknown = defaults.keys() - told, told - now.keys() - OF_SCHEDULERS
        name = self._saved.classes.get(path)
        alike = not (lacking and unknown) and (name == type(optimizer).__name__ or not (lacking or unknown))
        if not alike and (name not in _names(optimizer) or (lacking and unknown)):
            for full in sorted(map(where, lacking)):
                self._plan.miss(full)
            for full in sorted(map(where, unknown)):
                self._plan.leave_foreign(full, f"{full}: not in the state")
            options = {key: parts for key, parts in options.items() if key in now}
            saved = {key: value for key, value in saved.items() if key in now and _is_one(value) == _is_one(now[key])}
        if isinstance(optimizer, torch.optim.AdamW):
            saved = {key: value for key, value in saved.items() if key != WHAT_ADAMW_IS}
        builds = {
            key: rebuild(self._plan, self._saved.objects.get(where(key), "tensor"), where(key), now.get(key), maker())
            for key in options
        }

        def finish() -> None:
            for key, value in {**saved, **{key: build() for key, build in builds.items()}}.items():
                held = group.get(key)
                if isinstance(held, torch.Tensor) and type(value) in (int, float):
                    value = self._filled(held, value)
                group[key] = value

        self._plan.then(finish)
        return GroupTarget(alike, {**now, **saved})

    def _filled(self, tensor: torch.Tensor, number: float) -> torch.Tensor:
        """Returns the tensor, filled with a number. Groups share a tensor that all of them were given, as torch's
        constructors do: for another number than the first, returns a new one."""
        if self._numbers.setdefault(id(tensor), (tensor, number))[1] != number:
            return torch.full_like(tensor, number)
        return tensor.fill_(number)

    def _saved_text(self, path: str, group: SavedGroup) -> values.Json:
        """Returns the hyper-parameters as encoded, to compare them: a NaN does not equal itself, and comparing arrays
        gives no single answer."""
        return self._saved.values_with(group.layout).get(group_path(path, group.index), {})

    def _saved_hyper_parameters(self, path: str, group: SavedGroup) -> dict[str, Any]:
        """Returns a saved group's hyper-parameters without tensors. Raises StateMismatch if the entry is no dict."""
        name = group_path(path, group.index)
        found = values.decode(self._saved_text(path, group), name)
        if not isinstance(found, dict):
            raise StateMismatch(f"{name}: a {type(found).__name__}, expected the hyper-parameters of a group")
        return found

    def _saved_options(self, path: str, group: SavedGroup) -> Mapping[str, object]:
        """Returns the options of a saved group that hold tensors, by segment of their paths, each with the saved
        tensors that it is made of."""
        found = self._options.get(path)
        if found is None:  # for all groups at once: each parameter may have one
            found = self._options[path] = {}
            begin = group_path(path, 0)[:-1]
            for name in self._saved.beginning_with(begin, ()):
                if (entry := self._saved.tensors.get(name)) is not None:
                    index, _, rest = name[len(begin) :].partition("/")
                    segment, _, rest = rest.partition("/")
                    found.setdefault(index, {}).setdefault(segment, {})[rest] = entry.name
        return found.get(str(group.index), {})


def _names(optimizer: torch.optim.Optimizer) -> set[str | None]:
    """Returns the names of its class and base classes; and None, which a checkpoint without a name has."""
    return {None, *(cls.__name__ for cls in type(optimizer).__mro__)}


def _is_one(option: object) -> bool:
    """Returns whether an option is one number: Adam's eps is one, Adafactor's are two."""
    return not isinstance(option, (tuple, list))
