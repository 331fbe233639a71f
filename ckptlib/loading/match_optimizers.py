"""Matches the state of optimizers, tensor by tensor and by parameter, never through `load_state_dict`.

So it can go into an optimizer that has not stepped yet, and keeps the dtype it was saved with. If dtypes may differ,
state that torch's own optimizers keep in the dtype of the parameter gets that dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from itertools import chain

import torch
from torch.distributed.tensor import DTensor

from ckptlib.errors import UnsupportedState
from ckptlib.format.layout import OwnPerRank
from ckptlib.format.paths import below_any, join, key_of, segment_of
from ckptlib.format.values import Json
from ckptlib.loading.beside import Beside
from ckptlib.loading.load_plan import LoadPlan, fits, is_whole, room_for
from ckptlib.loading.match_groups import GroupTargets
from ckptlib.loading.trees import rebuild
from ckptlib.state.leaf import Sharded, leaf_of, local_of, torch_dtype
from ckptlib.state.optimizer_kinds import Kind, kind_of, scalars_of
from ckptlib.state.optimizers import names_of_params, warn_of_positions
from ckptlib.state.subclasses import another, apart, is_subclass, kind_in, nature

UNTRAINED = (
    "{full}: not in the state: the saved optimizer had this parameter, and the one at {path!r} has not; if "
    "add_param_group() gave it one in mid-training, call that before the load, too"
)

BY_POSITION = (
    "{full}: not in the checkpoint, which has the parameters of {path!r} by position alone, as nothing named them when "
    "it was saved; load it alone, in the order in which it was made: load(url, {{{path!r}: optimizer}}, strict=False); "
    "or import it again with params=, which names them"
)


class Params:
    """The parameters that a walk of the state has met."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """First name of a parameter, by its id."""
        self.ties: dict[str, str] = {}
        """First name of a parameter, by each further name."""
        self.by_hand: dict[int, Sharded] = {}
        """Hand-cut parameters, by id of the tensor that each of them holds."""

    def add(self, tensor: torch.Tensor, name: str) -> None:
        first = self.names.setdefault(id(tensor), name)
        if first != name:
            self.ties[name] = first


class OptimizerTargets:
    """Adds optimizers to a plan."""

    def __init__(self, plan: LoadPlan, params: Params) -> None:
        self._plan = plan
        self._saved = plan.saved
        self._params = params
        self._groups = GroupTargets(plan)
        self._instances: dict[int, dict[str, torch.Tensor]] = {}
        """By id of optimizer, and by nature: one of the tensor subclasses in its state."""
        self._shared: dict[str, tuple[str, torch.Tensor]] = {}
        """For the optimizer being added, by the first name of a saved tensor: the name under which it was made here,
        and the tensor made."""

    def add(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        """Adds an optimizer that is wanted."""
        saved_path = self._plan.named(path)
        groups = self._saved.groups.get(saved_path)
        if groups is None:
            self._plan.miss(path)
            return
        self._plan.use(saved_path)
        self._shared.clear()
        if any(param.is_meta for group in optimizer.param_groups for param in group["params"]):
            raise UnsupportedState(
                f"{path}: holds parameters on the meta device, which loading a module replaces; load the module first, "
                "then make the optimizer of its parameters and load that"
            )
        names = names_of_params(optimizer, self._params.names, path)
        warn_of_positions(optimizer, names, path, "loaded")
        wanted = [groups[n] for name in chain.from_iterable(names) if (n := self._saved_name(name)) in groups]
        looked_at = {0, *(group.layout for group in wanted)}
        entries = self._entries_by_param(saved_path, looked_at)
        is_own = self._saved.classes.get(saved_path) == type(optimizer).__name__
        before = {name for name, group in groups.items() if group.layout == 0}
        is_alike = is_own and before == {*map(self._saved_name, chain.from_iterable(names))}
        scalars, dtensors = scalars_of(optimizer), self._saved.dtensors.get(saved_path, {})
        taken: set[str] = set()
        by_position = bool(groups) and all(name.startswith("@") for name in groups)
        for i, (group, group_names) in enumerate(zip(optimizer.param_groups, names, strict=True)):
            origins = {groups[n] for name in group_names if (n := self._saved_name(name)) in groups}
            alike, options = self._groups.add(optimizer, group, i, saved_path, origins)
            kinds = cache(partial(kind_of, optimizer, options))
            for name, param in zip(group_names, group["params"], strict=True):
                saved_name = self._saved_name(name)
                if saved_name not in groups:
                    full = f"{path}/{name}"
                    self._plan.miss(full, BY_POSITION.format(full=full, path=saved_path) if by_position else None)
                    by_position = False  # reported once
                    continue
                taken.add(saved_name)
                self._plan.use(f"{saved_path}/{saved_name}")
                keys: Mapping[str, str] = entries.get(saved_name, {})
                if keys and is_alike:
                    keys = self._but_stepped_elsewhere(param, keys, optimizer.state.get(param, {}))
                    if not keys:
                        continue
                keys = {**keys, **self._values_elsewhere(saved_path, saved_name, keys, looked_at)}
                ordered = {key: keys[key] for key in self._saved.in_order(saved_path, keys)}
                kind = kinds(self._shape_of(param))
                full = f"{path}/{name}"
                known = ordered if kind is None else self._known(kind, optimizer, param, full, ordered, alike)
                if known is not None and self._fit(kind, param, full, saved_name, known):
                    numbers = frozenset[str]() if is_own and kind is None else scalars
                    then, by_hand = self._saved.tensors.get(saved_name), self._params.by_hand.get(id(param))
                    beside = Beside(self._plan, full, param, by_hand, then, dtensors.get(saved_name, frozenset()))
                    self._add_param_state(optimizer, options, beside, known, kind, numbers)
        for name, first in self._params.ties.items():
            taken.add(self._saved_name(name))
            self._check_tie(path, name, first, entries)
        left = sorted(groups.keys() - taken)
        untrained = {*map(self._saved_name, self._params.names.values())} if left else ()
        for name in left:
            full = f"{saved_path}/{name}"
            self._plan.leave(full, UNTRAINED.format(full=full, path=path) if name in untrained else None)

    def _but_stepped_elsewhere(
        self, param: torch.Tensor, keys: Mapping[str, str], now: Collection[str]
    ) -> Mapping[str, str]:
        """Returns the part of a parameter's saved state that this rank gets, for optimizers such as Muon that divide
        their parameters between the ranks so that another rank may step this one.

        Then the saved rank had the parameter, but no state of it, or only a count of steps. State that only others had
        would take memory, and would differ from that of the rank that goes on: the next save would find ranks that
        differ. All ranks that have a piece of a cut parameter step it, and a rank whose piece was empty had no state.
        State that the optimizer has already, `now`, is filled.

        Called only if the optimizer is of the saved class and has the saved rank's parameters: if replicas become
        stages of a pipeline, nobody would have what this rank leaves out. `keys`: each with its full name.
        """
        if isinstance(param, DTensor) or id(param) in self._params.by_hand:
            return keys
        had = {key: name for key, name in keys.items() if not self._saved.others_alone(name)}
        if len(had) == len(keys) or not (keys.keys() - had).isdisjoint(now):
            return keys
        was_whole = all(is_whole(self._saved.tensors[name]) for name in keys.values() if name in self._saved.tensors)
        return had if was_whole else keys

    def _values_elsewhere(
        self, path: str, saved_name: str, keys: Mapping[str, str], layouts: Collection[int]
    ) -> dict[str, str]:
        """Returns plain values of a parameter's state, such as a count of steps, that only other ranks have saved:
        layouts list tensors and objects only. By key, each with its full name.

        `keys`: the other entries, likewise. `layouts`: those whose values are looked at already. Looks up nothing for a
        parameter that has all its tensors from these, since each name may need further parts.
        """
        if {self._saved.first_layouts.get(name, 0) for name in keys.values()}.issubset(layouts):
            return {}
        above = f"{path}/{saved_name}" if path else saved_name
        tensors = (self._saved.tensors.get(name) for name in (saved_name, *keys.values()))
        is_own = any(entry is not None and isinstance(entry.holding, OwnPerRank) for entry in tensors)
        if is_own or self._saved.has_own(above):
            return {}
        names = {key: join(above, key) for key in self._saved.further_keys(path, keys)}
        found = {key: name for key, name in names.items() if name in self._saved.values_at(name)}
        for name in found.values():
            self._plan.use(name)
        return found

    def _saved_name(self, name: str) -> str:
        """Returns the name under which the checkpoint keeps a parameter's state."""
        return self._saved.first_name(self._plan.named(name))

    def _check_tie(self, path: str, name: str, first: str, entries: Mapping[str, Mapping[str, str]]) -> None:
        """Checks that one parameter here was not two: a pipeline has the tied weight on its first and last stage."""
        mine, taken = self._saved_name(name), self._saved_name(first)
        if mine == taken:
            return
        other = entries.get(taken, {})
        for key, saved_name in entries.get(mine, {}).items():
            if saved_name in self._saved.tensors and not self._saved.same(other.get(key, ""), saved_name):
                self._plan.mismatch(f"{path}/{name}: is tied to {first}, but their optimizer state differs")

    def _entries_by_param(self, path: str, layouts: Collection[int]) -> dict[str, dict[str, str]]:
        """Returns the saved state's keys of each parameter, each with its full name. `layouts`: of parameters."""
        found: dict[str, dict[str, str]] = {}
        prefix = f"{path}/" if path else ""
        names = self._saved.beginning_with(prefix, layouts)  # each parameter may have an optimizer
        nested = below_any(name for name in names if name in self._saved.objects and name != path)
        for name in names:
            if name == path or nested(name):
                continue
            self._plan.use(name)
            if self._saved.is_of_others(name):
                continue
            param, _, key = name[len(prefix) :].rpartition("/")
            found.setdefault(param, {})[key_of(key)] = name
        return found

    def _shape_of(self, param: torch.Tensor) -> tuple[int, ...]:
        by_hand = self._params.by_hand.get(id(param))
        return tuple(param.shape) if by_hand is None else tuple(by_hand.shape)

    def _known(
        self,
        kind: Kind,
        optimizer: torch.optim.Optimizer,
        param: torch.Tensor,
        name: str,
        keys: Mapping[str, str],
        alike: bool,
    ) -> dict[str, str] | None:
        """Returns the saved keys that an optimizer of torch's takes for a parameter; None if it cannot step with them.

        `keys`: each with its full name. `alike`: whether it is of the same kind; then unknown keys are the user's, and
        are kept.
        """
        strange = [] if alike else kind.strange(keys)
        for key in strange:
            self._plan.leave_foreign(f"{name}/{key}", f"{name}/{key}: means nothing to {type(optimizer).__name__}")
        lacking = kind.lacks(keys.keys() - strange, stateful=bool(optimizer.state.get(param)))
        for key in lacking:
            self._plan.miss(f"{name}/{key}")
        return None if lacking else {key: full for key, full in keys.items() if key not in strange}

    def _fit(self, kind: Kind | None, param: torch.Tensor, name: str, saved_name: str, keys: Mapping[str, str]) -> bool:
        """Returns whether state has the shape that the parameter needs; notes what has not.

        State with another shape than its parameter, such as a factored moment, had it when it was saved; the right one
        is known only for torch's classes. A parameter that has another shape now has no use for any of it.
        """
        shape = self._shape_of(param)
        expected = {} if kind is None else kind.shapes
        then = self._saved.tensors.get(saved_name)
        cut = then is not None and then.shape != shape
        was = f"; it was saved for one of {list(then.shape)}" if cut and then is not None else ""
        wrong = [
            f"{name}/{key}: is {list(entry.shape)}, for a parameter of {list(shape)}{was}"
            for key, full in keys.items()
            if (entry := self._saved.tensors.get(full)) is not None
            and entry.shape != expected.get(key, shape if cut and entry.shape else entry.shape)
        ]
        for text in wrong:
            self._plan.mismatch(text)
        return not wrong

    def _add_param_state(
        self,
        optimizer: torch.optim.Optimizer,
        options: Mapping[str, object],
        beside: Beside,
        entries: Mapping[str, str],
        kind: Kind | None,
        scalars: frozenset[str],
    ) -> None:
        """`options`: the hyper-parameters that its group will have. `scalars`: keys whose numbers become tensors."""
        builds: dict[str, Callable[[], object]] = {}
        param = beside.param
        now = optimizer.state.get(param, {})
        for key, name in entries.items():
            if name in self._saved.objects:
                tree, there = self._saved.objects[name], now.get(key)
                subclass = kind_in(tree)
                if subclass is not None and there is None:
                    there = self._another(optimizer, param, subclass, name)
                build = rebuild(self._plan, tree, name, there, beside.nested(key, name))
                casts = self._plan.cast and kind is not None
                builds[key] = partial(_with_floats, build, param.dtype) if casts else build
            elif name in self._saved.tensors:
                builds[key] = _constant(self._state_tensor(name, key, now.get(key), beside, options, kind))
            elif key in scalars:
                builds[key] = _constant(_scalar(self._saved.value(name), param, options))
            else:
                builds[key] = _constant(self._saved.value(name))

        def finish() -> None:
            built = {key: build() for key, build in builds.items()}
            had = optimizer.state.pop(param, None)  # so that all ranks have one order, whatever each had before
            if built or had is not None:
                optimizer.state[param] = built

        self._plan.then(finish)

    def _another(
        self, optimizer: torch.optim.Optimizer, param: torch.Tensor, kind: Mapping[str, Json], name: str
    ) -> torch.Tensor | None:
        """Returns an instance of a subclass like one that the optimizer has for another parameter, or None."""
        instances = self._instances.get(id(optimizer))
        if instances is None:
            instances = self._instances[id(optimizer)] = {}
            for value in chain.from_iterable(state.values() for state in optimizer.state.values()):
                if is_subclass(value):
                    instances.setdefault(nature(apart(value, name).kind), value)
        known = instances.get(nature(kind))

        def make(key: str, inner: torch.Tensor) -> torch.Tensor | None:
            entry = self._saved.tensors.get(join(name, key))
            if entry is None:
                return None
            with room_for(entry):
                return torch.empty(entry.shape, dtype=inner.dtype, device=_device_of(param))

        return None if known is None else another(known, param, make)

    def _state_tensor(
        self,
        name: str,
        key: str,
        now: object,
        beside: Beside,
        options: Mapping[str, object],
        kind: Kind | None,
    ) -> torch.Tensor:
        """Returns the present tensor if it fits, else one as the optimizer would make it with its future options."""
        entry, param = self._saved.tensors[name], beside.param
        dtype = torch_dtype(entry.dtype)
        if self._plan.cast and kind is not None and key in kind.shapes and _are_floats(dtype, param.dtype):
            dtype = param.dtype
        by_kernel = _is_by_kernel(options)
        misplaced = by_kernel and not entry.shape and isinstance(now, torch.Tensor) and now.device != _device_of(param)
        target: torch.Tensor | Sharded
        if fits(now, entry) and now.dtype == dtype and not misplaced:
            target = now
        elif key != "step" and (made := beside.make(segment_of(key), entry, now, dtype)) is not None:
            target = made
        else:
            on_device = by_kernel or (key != "step" and entry.shape)
            with room_for(entry):
                target = torch.empty(entry.shape, dtype=dtype, device=_device_of(param) if on_device else "cpu")
            under, first = self._shared.setdefault(entry.name, (name, target))
            if under != name:  # one tensor of several parameters, such as a count of steps, which is incremented once
                return first
        self._plan.fill(leaf_of(target, name, per_rank=False, owner=None), entry)
        return local_of(target)


def _device_of(param: torch.Tensor) -> torch.device:
    return param.to_local().device if isinstance(param, DTensor) else param.device


def _is_by_kernel(options: Mapping[str, object]) -> bool:
    """Returns whether a kernel makes the step, which takes no scalar from the host."""
    return bool(options.get("capturable") or options.get("fused"))


def _scalar(value: object, param: torch.Tensor, options: Mapping[str, object]) -> object:
    """Returns the tensor that torch's own load makes of a number."""
    if not isinstance(value, (int, float)):
        return value
    double = torch.get_default_dtype() == torch.float64 and not options.get("fused")
    device = _device_of(param) if _is_by_kernel(options) else "cpu"
    return torch.tensor(float(value), dtype=torch.float64 if double else torch.float32, device=device)


def _with_floats(build: Callable[[], object], dtype: torch.dtype) -> object:
    """Returns what is built, with all floats nested in it in this dtype, as torch's own load has them."""

    def cast(node: object) -> object:
        if isinstance(node, torch.Tensor):
            fits = is_subclass(node) or not _are_floats(node.dtype, dtype)
            return node if fits else node.to(dtype)
        if isinstance(node, (list, tuple)):
            return type(node)(map(cast, node))
        return {key: cast(value) for key, value in node.items()} if isinstance(node, dict) else node

    return cast(build())


def _are_floats(*dtypes: torch.dtype) -> bool:
    return all(dtype.is_floating_point for dtype in dtypes)


def _constant(value: object) -> Callable[[], object]:
    return lambda: value
