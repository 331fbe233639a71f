"""Matches a state with a checkpoint: the tensors to fill, and the calls to make once they are filled.

Modules and optimizers are filled in place; then the modules' own load code runs. Optimizer state is written tensor by
tensor, so it can go into an optimizer that has not stepped yet, and it keeps the dtype it was saved with.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from itertools import chain
from operator import setitem
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ckptlib.format import tagged_values, values
from ckptlib.loading.load_plan import LoadPlan, Setter
from ckptlib.loading.match_lists import ListTargets
from ckptlib.loading.match_nests import NestTargets
from ckptlib.loading.match_optimizers import OptimizerTargets, Params
from ckptlib.loading.selection import Only, Rename, Selection
from ckptlib.loading.targets import Targets, outside_inference
from ckptlib.loading.trees import add_object
from ckptlib.reading.saved_names import SavedNames
from ckptlib.state.frameworks import counts_alone, loader_of
from ckptlib.state.leaf import PerRank, Sharded, home_of, local_of
from ckptlib.state.made_tensors import Holder, put_back
from ckptlib.state.modules import attributes_of, state_to_fill
from ckptlib.state.nests import is_all_plain
from ckptlib.state.own_loads import innermost, own_loads, parameters_there, resizes
from ckptlib.state.rng import LoadedRng
from ckptlib.state.subclasses import is_subclass, like
from ckptlib.state.visitor import Visitor, is_plain
from ckptlib.state.wrappers import canonical, is_extra_state

Given = dict[int, tuple[nn.Module, dict[str, object]]]
"""By id of a submodule that loads what its hooks made: the submodule, and the new entries for it by name."""


def targets(
    state: object,
    saved: SavedNames,
    *,
    rename: Rename = None,
    only: Only = None,
    cast: bool = False,
    device: str | torch.device | None = None,
    optional: str | Sequence[str] = (),
    tops: Sequence[str] = (),
) -> Targets:
    """Returns the targets that turn `state` into the saved one. Changes nothing yet.

    `device`: where to allocate tensors that have no memory. `tops`: the names of the user's own entries.
    """
    plan = LoadPlan(saved, Selection(only, rename, optional), cast)
    walk = _Walk(plan, None if device is None else torch.device(device))
    with outside_inference(), torch.no_grad():
        walk.visit(state, None)
    walk.nests.grow()
    return plan.targets(tops)


class _Walk(Visitor[Setter]):
    """Walks a state, and hands down setters that replace an entry."""

    def __init__(self, plan: LoadPlan, device: torch.device | None) -> None:
        super().__init__()
        self._plan = plan
        self._device = device
        self._params = Params()
        self._targets = OptimizerTargets(plan, self._params)
        self._lists = ListTargets(plan)
        self.nests = NestTargets(plan)

    @override
    def below_per_rank(self, given: Setter) -> Setter:
        return None if given is None else lambda value: given(PerRank(value))

    @override
    def below(self, container: object, given: Setter) -> Callable[[object], Setter]:
        if isinstance(container, tuple):
            return _tuple_setter(container, given)
        return _setter(container) if isinstance(container, (MutableMapping, list)) else lambda key: None

    @override
    def entries(self, node: Sequence[object], path: str) -> Sequence[object]:
        """Plans to make a list of plain values, such as one of losses that grows, as long as it was when it was saved.
        Returns the entries that stay."""
        if not isinstance(node, list) or not all(map(is_plain, node)):
            return node
        return node[: self._lists.add(node, path)]

    @override
    def add_nest(self, node: object, path: str, given: Setter) -> bool:
        if not is_all_plain(node):
            return False
        if given is None and not isinstance(node, (list, MutableMapping)):
            self._check_unchanged(node, path)
        if self.nests.add(node, path, given):
            return True
        return isinstance(node, tuple) and all(map(is_plain, node)) and self._lists.add_tuple(node, path, given)

    @override
    def add_any_tensor(self, tensor: torch.Tensor | Sharded, path: str, given: Setter) -> None:
        self._params.add(local_of(tensor), path)
        if isinstance(tensor, Sharded):
            self._params.by_hand[id(tensor.tensor)] = tensor
        self._plan.add_tensor(tensor, path)

    @override
    def add_generator(self, generator: torch.Generator, path: str) -> None:
        self._plan.add_generator(generator, path)

    @override
    def add_stateful(self, node: Any, path: str, given: Setter) -> None:
        device = torch.device("cpu") if isinstance(node, LoadedRng) else None
        if add_object(self._plan, path, node.state_dict, loader_of(node, path), device) and counts_alone(node):
            self._plan.alone.append(path)

    @override
    def add_plain(self, value: object, path: str, given: Setter) -> None:
        if given is None:
            self._check_unchanged(value, path)
        if not self.nests.add_plain(path, given):
            self._plan.add_value(path, given)

    def _check_unchanged(self, value: object, path: str) -> None:
        """Checks that a value in an immutable container, such as a `MappingProxyType`, is the saved one."""
        name = self._plan.named(path)
        saved = self._plan.saved.values_at(name)
        if not self._plan.wanted(path) or name not in saved:
            return
        encode = values.encode_nest if values.is_nest(saved[name]) else values.encode
        if encode(value, path) != saved[name]:
            there = tagged_values.brief(self._plan.saved.value(name))
            self._plan.mismatch(
                f"{path}: is {tagged_values.brief(value)}, the checkpoint has {there}, and the mapping around it "
                "cannot be changed; give a dict"
            )

    @override
    def add_optimizer(self, optimizer: torch.optim.Optimizer, path: str, given: Setter) -> None:
        if self._plan.wanted(path, whole=True):
            self.refuse_hidden(optimizer, path)
            self._targets.add(optimizer, path)

    @override
    def add_module(self, module: nn.Module, path: str, given: Setter) -> None:
        made: dict[int, torch.Tensor] = {}
        state, holders = state_to_fill(module, path)  # tensors that a hook puts in the place of parameters count
        owners = attributes_of(module)
        back: Given = {}
        for name, value in state:
            full = f"{path}/{name}" if path else name
            if is_extra_state(name):
                continue
            if not isinstance(value, torch.Tensor):
                if name in holders:
                    self._add_other(value, full, holders[name], back, self._device_of(module))
                continue
            self._params.add(value, full)
            if name in holders:
                self._add_made(value, full, holders[name], back)
            elif (resized := self._resized(value, full, owners.get(id(value), []))) is not None:
                made[id(value)], holder = resized
                self._add_made(made[id(value)], full, holder, back)
            elif value.device.type != "meta":
                self._plan.add_tensor(value, full)
            elif self._plan.wanted(full):
                self._materialise(value, full, owners.get(id(value), []), made)
        self._add_extra_states(module, path)  # first: the module's own load code may need them
        there = parameters_there(module)
        for loader, entries in back.values():
            self._plan.then(partial(put_back, loader, entries, loader is innermost(module), there))
        filled = (n for n, t in state if isinstance(t, torch.Tensor) and self._plan.fills(made.get(id(t), t)))
        for call in own_loads(module, filled, [loader for loader, _ in back.values()], there):
            self._plan.then(call)

    def _resized(
        self, buffer: torch.Tensor, name: str, owners: Sequence[tuple[nn.Module, str]]
    ) -> tuple[torch.Tensor, Holder] | None:
        """Returns a tensor of the saved shape, if that differs and the module itself would resize its buffer to it."""
        if type(buffer) is not torch.Tensor or len(owners) != 1 or buffer.is_meta or not self._plan.wanted(name):
            return None
        ((module, attribute),) = owners
        entry = self._plan.saved.tensors.get(self._plan.named(name))
        if entry is None or entry.shape == tuple(buffer.shape):
            return None
        above = name[: len(name) - len(attribute)]
        beside = {own: self._plan.saved.tensors.get(self._plan.named(above + own)) for own in [*module._buffers.keys()]}
        shapes = {own: found.shape for own, found in beside.items() if found is not None}
        if not resizes(module, attribute, {**shapes, attribute: entry.shape}):
            return None
        return buffer.new_empty(entry.shape), Holder(module, attribute)

    def _add_made(self, tensor: torch.Tensor, name: str, holder: Holder, given: Given) -> None:
        """Plans to fill a tensor that hooks made, which then goes back through `load_state_dict()`."""
        if tensor.device.type == "meta":
            if self._plan.wanted(name):
                self._plan.mismatch(
                    f"{name}: hooks of state_dict() make it, and the module is on the meta device; give the module "
                    "memory before the load: module.to_empty(device=...)"
                )
            return
        self._plan.add_tensor(tensor, name)
        if self._plan.fills(tensor):
            given.setdefault(id(holder.module), (holder.module, {}))[1][holder.name] = tensor

    def _add_other(self, value: object, name: str, holder: Holder, given: Given, device: torch.device | None) -> None:
        """Plans to rebuild an entry that is no tensor, such as a list of some, which then goes back through
        `load_state_dict()`."""
        known = given.get(id(holder.module), (holder.module, {}))
        if add_object(self._plan, name, lambda: value, partial(setitem, known[1], holder.name), device):
            given[id(holder.module)] = known
        else:
            self._plan.excuse(name)

    def _device_of(self, module: nn.Module) -> torch.device | None:
        """Returns the device where the module's tensors are, or will be."""
        tensor = next(chain(module.parameters(), module.buffers()), None)
        if tensor is None:
            return self._device
        return tensor.device if tensor.device.type != "meta" else self._device or home_of(tensor)

    def _materialise(
        self, meta: torch.Tensor, name: str, owners: Sequence[tuple[nn.Module, str]], made: dict[int, torch.Tensor]
    ) -> None:
        """Gives a parameter or buffer without memory some, and puts it into its module when it is filled."""
        new = made.get(id(meta))
        if new is None:
            device = self._device or home_of(meta)
            if is_subclass(meta):
                new = like(meta, lambda inner: torch.empty_like(inner, device=device))
            else:
                new = torch.empty_like(meta, device=device)
            if isinstance(meta, nn.Parameter):
                new = nn.Parameter(new, requires_grad=meta.requires_grad)
            made[id(meta)] = new  # one for all its names, so that ties are kept
        self._plan.add_tensor(new, name)
        if not self._plan.fills(new):
            return  # it stays without memory, rather than get some that nothing fills
        for module, attribute in owners:
            self._plan.then(_assigner(module, attribute, new))

    def _add_extra_states(self, module: nn.Module, path: str) -> None:
        for name, submodule in module.named_modules(remove_duplicate=False):
            if type(submodule).get_extra_state is not nn.Module.get_extra_state:
                key = canonical(module, f"{name}._extra_state" if name else "_extra_state")
                key = f"{path}/{key}" if path else key
                add_object(self._plan, key, submodule.get_extra_state, submodule.set_extra_state)


def _setter(container: MutableMapping[Any, object] | list[object]) -> Callable[[object], Setter]:
    return lambda key: partial(setitem, container, key)


def _tuple_setter(container: tuple[object, ...], setter: Setter) -> Callable[[Any], Setter]:
    """Returns setters that replace a tuple, in its container, by one with the new value."""
    now = list(container)

    def put(i: int, value: object) -> None:
        assert setter is not None
        now[i] = value
        setter(tuple(now))

    return lambda i: None if setter is None else partial(put, i)


def _assigner(module: nn.Module, attribute: str, new: torch.Tensor) -> Callable[[], None]:
    def assign() -> None:
        if isinstance(new, nn.Parameter):
            module._parameters[attribute] = new
        else:
            module._buffers[attribute] = new

    return assign
