"""Where loaded data goes: the tensors to be filled, and what is to be done once they are.

The walk mirrors `ckptlib.state.flatten`. Modules and optimizers are filled in place; optimizer state is written tensor
by tensor, so it goes into an optimizer that has not stepped yet and keeps the dtype it was saved with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckptlib import values
from ckptlib.errors import StateMismatch, UnsupportedState
from ckptlib.layout import PerRank as HeldPerRank
from ckptlib.layout import TensorEntry
from ckptlib.leaf import Leaf, PerRank, Plain, Sharded, dtype_name, join, leaf_of, local_of
from ckptlib.modules import canonical, is_extra_state, named_state, owners_of
from ckptlib.optimizers import group_path, hyper_parameters, names_of_params, refuse_optimizer
from ckptlib.reader import Want
from ckptlib.saved import Saved
from ckptlib.state import is_stateful
from ckptlib.values import Json


@dataclass
class Targets:
    """What a load will do to a state."""

    wants: list[Want] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """Names that the state has and the checkpoint has not."""
    unexpected: list[str] = field(default_factory=list)
    """Names that the checkpoint has and the state has not."""
    mismatched: list[str] = field(default_factory=list)
    """Names whose shape or dtype differ, with both."""
    values: dict[str, object] = field(default_factory=dict)
    """Plain values by path, as saved."""
    finish: list[Callable[[], None]] = field(default_factory=list)
    """To be called in order, when every want is filled."""


Rename = Mapping[str, str] | Callable[[str], str] | None
Only = str | Sequence[str] | None


def targets(state: object, saved: Saved, *, rename: Rename = None, only: Only = None, cast: bool = False) -> Targets:
    """What is to be filled and done so that `state` becomes what was saved. Changes nothing yet."""
    walk = _Walk(saved, rename, only, cast)
    with torch.no_grad():
        walk.collect(state, "", None)
        for path, module in walk.modules:
            walk.add_module(module, path)
        for path, optimizer in walk.optimizers:
            walk.add_optimizer(optimizer, path)
    walk.note_unexpected()
    return walk.targets


Setter = Callable[[object], None] | None


class _Walk:
    def __init__(self, saved: Saved, rename: Rename, only: Only, cast: bool) -> None:
        self.targets = Targets()
        self.modules: list[tuple[str, nn.Module]] = []
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self._saved = saved
        self._rename = rename
        self._only = [only] if isinstance(only, str) else only
        self._cast = cast
        self._param_names: dict[int, str] = {}
        self._ties: dict[str, str] = {}
        """By further name of a parameter: its first."""
        self._by_hand: dict[int, Sharded] = {}
        """By id of the tensor that each of them holds."""
        self._used: set[str] = set()
        self._filled: dict[int, tuple[object, str]] = {}
        """By id: a tensor of the state, kept alive, and the saved one that fills it."""

    # What the caller asked for

    def _named(self, name: str) -> str:
        if self._rename is None:
            return name
        if callable(self._rename):
            return self._rename(name)
        return self._rename.get(name, name)

    def _wanted(self, path: str) -> bool:
        if self._only is None:
            return True
        return any(fnmatchcase(path, p) or path == p or path.startswith(f"{p}/") for p in self._only)

    # The walk

    def collect(self, node: object, path: str, setter: Setter) -> None:
        if isinstance(node, (torch.Tensor, Sharded)):
            self._name_param(local_of(node), path)
            if isinstance(node, Sharded):
                self._by_hand[id(node.tensor)] = node
            self.add_tensor(node, path)
        elif isinstance(node, PerRank):
            self.collect(node.value, path, None if setter is None else lambda value: setter(PerRank(value)))
        elif isinstance(node, nn.Module):
            self.modules.append((path, node))
        elif isinstance(node, torch.optim.Optimizer):
            refuse_optimizer(node, path)
            self.optimizers.append((path, node))
        elif isinstance(node, torch.Generator):
            self._add_generator(node, path)
        elif isinstance(node, Mapping):
            for key, value in node.items():
                is_tensor = isinstance(value, torch.Tensor)  # filled in place; there may be thousands
                self.collect(value, join(path, key), None if is_tensor else _setter(node, key))
        elif isinstance(node, (list, tuple)) and type(node) in (list, tuple):
            put = _tuple_setter(node, setter) if isinstance(node, tuple) else lambda i: _setter(node, i)
            for i, value in enumerate(node):
                self.collect(value, join(path, i), put(i))
        elif is_stateful(node):
            refuse_optimizer(node, path)
            self._add_object(path, node.state_dict, node.load_state_dict)  # type: ignore[attr-defined]
        else:
            self._add_value(path, setter)

    def _name_param(self, tensor: torch.Tensor, name: str) -> None:
        first = self._param_names.setdefault(id(tensor), name)
        if first != name:
            self._ties[name] = first

    def add_tensor(self, tensor: torch.Tensor | Sharded, name: str) -> None:
        """Fills a tensor of the state in place."""
        if not self._wanted(name):
            return
        saved_name = self._named(name)
        entry = self._saved.tensors.get(saved_name)
        if entry is None:
            self.targets.missing.append(name)
            return
        self._used.add(saved_name)
        leaf = leaf_of(tensor, name, per_rank=False, owner=None)
        if leaf is None:
            return
        if leaf.shape != entry.shape or (leaf.dtype != entry.dtype and not self._cast):
            self.targets.mismatched.append(
                f"{name}: target is {leaf.dtype}{list(leaf.shape)}, checkpoint has {entry.dtype}{list(entry.shape)}"
            )
            return
        if any(_is_expanded(piece) for _, piece in leaf.pieces):
            self.targets.mismatched.append(f"{name}: elements of the target share memory; give tensor.contiguous()")
            return
        first = self._filled.get(id(tensor))
        if first is None:
            self._filled[id(tensor)] = (tensor, entry.name)
            self.targets.wants.append(_want(saved_name, leaf, entry))
        elif not self._saved.same(first[1], entry.name):  # tied: filled once, under its first name
            self.targets.mismatched.append(
                f"{name}: is tied to what {first[1]} fills, but the checkpoint has different values for them; load "
                "them into tensors of their own"
            )

    def _add_value(self, path: str, setter: Setter) -> None:
        if not self._wanted(path):
            return
        name = self._named(path)
        if name not in self._saved.values:
            self.targets.missing.append(path)
            return
        self._used.add(name)
        value = self.targets.values[path] = self._saved.value(name)
        if setter is not None:
            self.targets.finish.append(lambda: setter(value))

    def _add_generator(self, generator: torch.Generator, path: str) -> None:
        state = generator.get_state()
        before = len(self.targets.wants)
        self.add_tensor(state, path)
        if len(self.targets.wants) > before:
            self.targets.finish.append(lambda: _call(generator.set_state, state))

    def _add_object(self, path: str, get: Callable[[], object], load: Callable[[Any], object]) -> None:
        """An object is given back what its `state_dict()` once was, rebuilt."""
        if not self._wanted(path):
            return
        name = self._named(path)
        tree = self._saved.objects.get(name)
        if tree is not None:
            self._used.add(name)
            now = get()
            build = self._rebuild(tree, name, now)
            self.targets.finish.append(lambda: _call(load, build()))
        elif name in self._saved.values:
            self._used.add(name)
            self.targets.finish.append(lambda: _call(load, self._saved.value(name)))
        else:
            self.targets.missing.append(path)

    def _rebuild(self, tree: Json, path: str, now: object, device: torch.device | None = None) -> Callable[[], object]:
        """Wants what the tree needs; returns what makes the object once that is filled.

        `device`: of tensors that the object has not yet.
        """
        if tree == "tensor":
            tensor = self._tensor_for(path, now, device)
            return lambda: tensor
        if tree == "value":
            self._used.add(path)
            return lambda: self._saved.value(path)
        match tree:
            case {"dict": list(pairs)}:
                made = self._rebuild_pairs(pairs, path, now, device)
                return lambda: {key: build() for key, build in made.items()}
            case {"odict": list(pairs)}:
                made = self._rebuild_pairs(pairs, path, now, device)
                return lambda: OrderedDict((key, build()) for key, build in made.items())
            case {"list": list(items)}:
                builds = self._rebuild_items(items, path, now, device)
                return lambda: [build() for build in builds]
            case {"tuple": list(items)}:
                builds = self._rebuild_items(items, path, now, device)
                return lambda: tuple(build() for build in builds)
            case _:
                raise StateMismatch(f"{path}: the layout's tree of this object cannot be read: {str(tree)[:80]}")

    def _rebuild_pairs(
        self, pairs: list[Json], path: str, now: object, device: torch.device | None
    ) -> dict[Any, Callable[[], object]]:
        made = {}
        for pair in pairs:
            assert isinstance(pair, list)
            key: Any = values.decode(pair[0], path)
            inner = now.get(key) if isinstance(now, Mapping) else None
            made[key] = self._rebuild(pair[1], join(path, key), inner, device)
        return made

    def _rebuild_items(
        self, trees: list[Json], path: str, now: object, device: torch.device | None
    ) -> list[Callable[[], object]]:
        have = now if isinstance(now, (list, tuple)) and len(now) == len(trees) else [None] * len(trees)
        return [self._rebuild(tree, join(path, i), have[i], device) for i, tree in enumerate(trees)]

    def _tensor_for(self, path: str, now: object, device: torch.device | None = None) -> torch.Tensor:
        """A tensor to fill: the one that the object has, where it fits, else a new one."""
        entry = self._saved.tensors[path]
        if isinstance(now, PerRank):
            now = now.value
        if isinstance(now, Sharded):
            self.add_tensor(now, path)
            return now.tensor
        self._used.add(path)
        if _fits(now, entry) and self._filled.setdefault(id(now), (now, entry.name))[1] == entry.name:
            tensor = now
        else:  # also where the object has one tensor in two places, and the checkpoint has two
            tensor = torch.empty(entry.shape, dtype=_dtype(entry), device=device)
        leaf = leaf_of(tensor, path, per_rank=False, owner=None)
        if leaf is not None:
            self.targets.wants.append(_want(path, leaf, entry))
        return tensor

    # Modules

    def add_module(self, module: nn.Module, path: str) -> None:
        made: dict[int, torch.Tensor] = {}
        state = list(named_state(module, path))  # what a hook of it puts in the place of parameters counts
        owners = owners_of(module)
        for name, value in state:
            full = f"{path}/{name}" if path else name
            if not isinstance(value, torch.Tensor) or is_extra_state(name):
                continue
            self._name_param(value, full)
            if value.device.type != "meta":
                self.add_tensor(value, full)
            elif self._wanted(full):
                self._materialise(value, full, owners.get(id(value), []), made)
        self._add_extra_states(module, path)

    def _materialise(
        self, meta: torch.Tensor, name: str, owners: Sequence[tuple[nn.Module, str]], made: dict[int, torch.Tensor]
    ) -> None:
        """A parameter or buffer without memory is given some, and is put into its module when it is filled."""
        new = made.get(id(meta))
        if new is None:
            device = torch.empty(0).device if not torch.cuda.is_available() else torch.device("cuda")
            new = torch.empty_like(meta, device=device)
            if isinstance(meta, nn.Parameter):
                new = nn.Parameter(new, requires_grad=meta.requires_grad)
            made[id(meta)] = new  # one for all its names, so that what was tied stays tied
        self.add_tensor(new, name)
        if id(new) not in self._filled:
            return  # it stays without memory rather than get some that nothing was read into
        for module, attribute in owners:
            self.targets.finish.append(_assigner(module, attribute, new))

    def _add_extra_states(self, module: nn.Module, path: str) -> None:
        for name, submodule in module.named_modules(remove_duplicate=False):
            if type(submodule).get_extra_state is not nn.Module.get_extra_state:
                prefix = f"{name}." if name else ""
                key = join_module(path, _canonical_prefix(module, prefix) + "_extra_state")
                self._add_object(key, submodule.get_extra_state, submodule.set_extra_state)

    # Optimizers

    def add_optimizer(self, optimizer: torch.optim.Optimizer, path: str) -> None:
        if not self._wanted(path):
            return
        saved_path = self._named(path)
        groups = self._saved.groups.get(saved_path)
        if groups is None:
            self.targets.missing.append(path)
            return
        self._used.add(saved_path)
        if any(param.is_meta for group in optimizer.param_groups for param in group["params"]):
            raise UnsupportedState(
                f"{path}: holds parameters on the meta device, which loading a module replaces; load the module first, "
                "then make the optimizer of its parameters and load that"
            )
        names = names_of_params(optimizer, self._param_names)
        entries = self._entries_by_param(saved_path)
        taken: set[str] = set()
        for i, (group, group_names) in enumerate(zip(optimizer.param_groups, names, strict=True)):
            self._add_hyper_parameters(group, group_names, saved_path, groups, i)
            for name, param in zip(group_names, group["params"], strict=True):
                saved_name = self._saved.first_name(self._named(name))
                if saved_name not in groups:
                    self.targets.missing.append(f"{path}/{name}")
                    continue
                taken.add(saved_name)
                self._used.add(f"{saved_path}/{saved_name}")
                self._add_param_state(optimizer, group, param, entries.get(saved_name, {}))
        for name, first in self._ties.items():
            taken.add(self._saved.first_name(self._named(name)))
            self._check_tie(path, name, first, entries)
        self.targets.unexpected += [f"{saved_path}/{name}" for name in sorted(groups.keys() - taken)]

    def _check_tie(self, path: str, name: str, first: str, entries: Mapping[str, Mapping[str, str]]) -> None:
        """One parameter here may have been two: a pipeline has the tied weight on its first stage and on its last."""
        mine, taken = (self._saved.first_name(self._named(n)) for n in (name, first))
        if mine == taken:
            return
        other = entries.get(taken, {})
        for key, saved_name in entries.get(mine, {}).items():
            if saved_name in self._saved.tensors and not self._saved.same(other.get(key, ""), saved_name):
                self.targets.mismatched.append(f"{path}/{name}: is tied to {first}, but their optimizer state differs")

    def _entries_by_param(self, path: str) -> dict[str, dict[str, str]]:
        """By parameter: the keys of its saved state, each with its full name."""
        found: dict[str, dict[str, str]] = {}
        prefix = f"{path}/" if path else ""
        nested = tuple(f"{p}/" for p in self._saved.objects if p.startswith(prefix) and p != path)
        for name in (*self._saved.tensors, *self._saved.values, *self._saved.objects):
            if name == path or not name.startswith(prefix) or name.startswith(nested):
                continue
            param, _, key = name[len(prefix) :].rpartition("/")
            found.setdefault(param, {})[key.replace("%2F", "/").replace("%25", "%")] = name
            self._used.add(name)
        return found

    def _add_param_state(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        param: torch.Tensor,
        entries: Mapping[str, str],
    ) -> None:
        builds: dict[str, Callable[[], object]] = {}
        now = optimizer.state.get(param, {})
        for key, name in entries.items():
            if name in self._saved.objects:
                builds[key] = self._rebuild(self._saved.objects[name], name, now.get(key), _device_of(param))
            elif name in self._saved.tensors:
                builds[key] = _constant(self._state_tensor(name, key, now.get(key), param, group))
            else:
                builds[key] = _constant(self._saved.value(name))

        def finish() -> None:
            if builds or param in optimizer.state:
                optimizer.state[param] = {key: build() for key, build in builds.items()}

        self.targets.finish.append(finish)

    def _state_tensor(
        self, name: str, key: str, now: object, param: torch.Tensor, group: Mapping[str, Any]
    ) -> torch.Tensor:
        """The tensor that is there, or one such as the optimizer itself would make."""
        entry = self._saved.tensors[name]
        by_hand = self._by_hand.get(id(param))
        if by_hand is not None and key != "step" and entry.shape == by_hand.shape:
            alike = isinstance(now, torch.Tensor) and (now.shape, dtype_name(now)) == (param.shape, entry.dtype)
            tensor = now if alike and isinstance(now, torch.Tensor) else torch.empty_like(param, dtype=_dtype(entry))
            leaf = leaf_of(Sharded(tensor, by_hand.offset, by_hand.shape), name, per_rank=False, owner=None)
            assert leaf is not None
            self.targets.wants.append(_want(name, leaf, entry))
            return tensor
        if _fits(now, entry):
            tensor = now
        elif key != "step" and entry.shape == tuple(param.shape):
            tensor = torch.empty_like(param, dtype=_dtype(entry), requires_grad=False)
        else:
            on_device = group.get("capturable") or group.get("fused") or (key != "step" and entry.shape)
            tensor = torch.empty(entry.shape, dtype=_dtype(entry), device=_device_of(param) if on_device else "cpu")
        leaf = leaf_of(tensor, name, per_rank=False, owner=None)
        if leaf is not None:
            self.targets.wants.append(_want(name, leaf, entry))
        return tensor

    def _add_hyper_parameters(
        self, group: dict[str, Any], names: Sequence[str], path: str, groups: Mapping[str, int], index: int
    ) -> None:
        """A group takes those of the saved group that its parameters were in."""
        origins = {groups[n] for name in names if (n := self._saved.first_name(self._named(name))) in groups}
        if not origins:
            origins = {index} if group_path(path, index) in self._saved.values and not names else set()
        origin = min(origins, default=None)
        if origin is None or group_path(path, origin) not in self._saved.values:
            return
        saved: Any = self._saved.value(group_path(path, origin))
        options = self._saved_options(group_path(path, origin))
        different = [
            o
            for o in origins
            if self._saved.value(group_path(path, o)) != saved or self._saved_options(group_path(path, o)) != options
        ]
        if different:
            self.targets.mismatched.append(
                f"{path}: group {index} holds parameters that were saved in groups {sorted(origins)} with different "
                "hyper-parameters; load them into groups that can be told apart"
            )
            return
        now = dict(hyper_parameters(group))
        prefix = group_path(path, origin) + "/"
        builds = {
            key: self._rebuild(self._saved.objects.get(prefix + key, "tensor"), prefix + key, now.get(key))
            for key in options
        }

        def finish() -> None:
            for key, value in {**saved, **{key: build() for key, build in builds.items()}}.items():
                if isinstance(group.get(key), torch.Tensor) and isinstance(value, float):
                    group[key].fill_(value)
                else:
                    group[key] = value

        self.targets.finish.append(finish)

    def _saved_options(self, path: str) -> dict[str, object]:
        """Of a saved group: the options that hold tensors, each with the saved tensors it is made of."""
        found: dict[str, dict[str, str]] = {}
        for name, entry in self._saved.tensors.items():
            if name.startswith(f"{path}/"):
                key, _, rest = name[len(path) + 1 :].partition("/")
                found.setdefault(key, {})[rest] = entry.name
        return dict(found)

    def note_unexpected(self) -> None:
        """Everything saved that nobody took."""
        trees = tuple(f"{path}/" for path in self._saved.objects)
        for name in (*self._saved.tensors, *self._saved.values, *self._saved.objects):
            # what belongs to an object that is loaded as a whole is taken, or not, with it
            if name not in self._used and self._wanted(name) and not name.startswith(trees):
                self.targets.unexpected.append(name)


def _want(name: str, leaf: Leaf, entry: TensorEntry) -> Want:
    plain = isinstance(leaf.held, Plain) and not isinstance(entry.holding, HeldPerRank)
    return Want(name, leaf.pieces, everywhere=plain and bool(leaf.pieces))


def join_module(path: str, name: str) -> str:
    """The full name of a module's tensor."""
    return f"{path}/{name}" if path else name


def _canonical_prefix(module: nn.Module, prefix: str) -> str:
    return canonical(module, prefix + "x")[:-1]


def _setter(container: object, key: Any) -> Setter:
    if isinstance(container, (MutableMapping, list)):

        def put(value: object) -> None:
            container[key] = value

        return put
    return None


def _tuple_setter(node: tuple[object, ...], setter: Setter) -> Callable[[int], Setter]:
    """A tuple is replaced, in what holds it, by one with the new value."""
    now = list(node)

    def put(i: int, value: object) -> None:
        assert setter is not None
        now[i] = value
        setter(tuple(now))

    return lambda i: None if setter is None else partial(put, i)


def _is_expanded(tensor: torch.Tensor) -> bool:
    steps = tensor.stride()
    return 0 in steps and any(step == 0 and size > 1 for step, size in zip(steps, tensor.shape, strict=True))


def _fits(now: object, entry: TensorEntry) -> TypeGuard[torch.Tensor]:
    """Whether what is there can be filled as it is."""
    if not isinstance(now, torch.Tensor) or now.is_meta or _is_expanded(now):
        return False
    return (tuple(now.shape), dtype_name(now)) == (entry.shape, entry.dtype)


def _device_of(param: torch.Tensor) -> torch.device:
    return param.to_local().device if isinstance(param, DTensor) else param.device


def _assigner(module: nn.Module, attribute: str, new: torch.Tensor) -> Callable[[], None]:
    def assign() -> None:
        if isinstance(new, nn.Parameter):
            module._parameters[attribute] = new
        else:
            module._buffers[attribute] = new

    return assign


def _call(function: Callable[[Any], object], argument: object) -> None:
    function(argument)


def _constant(value: object) -> Callable[[], object]:
    return lambda: value


def _dtype(entry: TensorEntry) -> torch.dtype:
    found: torch.dtype = getattr(torch, entry.dtype)
    return found
