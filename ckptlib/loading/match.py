"""Where loaded data goes: the tensors to be filled, and what is to be done once they are.

The walk mirrors `ckptlib.state.flatten`. Modules and optimizers are filled in place; optimizer state is written tensor
by tensor, so it goes into an optimizer that has not stepped yet and keeps the dtype it was saved with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ckptlib.loading.load_plan import Filling, Setter
from ckptlib.loading.match_optimizers import OptimizerTargets, Params
from ckptlib.loading.reader import Want
from ckptlib.loading.saved_names import Saved
from ckptlib.loading.selection import Asked, Only, Rename
from ckptlib.state.flatten import check_depth, is_stateful
from ckptlib.state.frameworks import loader_of, refuse_loader, torch_optimizer, unwrapped
from ckptlib.state.leaf import PerRank, Sharded, home_of, join, local_of
from ckptlib.state.modules import canonical, is_extra_state, named_state, owners_of
from ckptlib.state.optimizers import refuse_optimizer
from ckptlib.state.subclasses import is_subclass, like


@dataclass(frozen=True, slots=True)
class Targets:
    """What a load will do to a state."""

    wants: list[Want]
    missing: list[str]
    """Names that the state has and the checkpoint has not."""
    unexpected: list[str]
    """Names that the checkpoint has and the state has not, or that were asked for and the state has not."""
    mismatched: list[str]
    """Names whose shape or dtype differ, with both."""
    foreign: dict[str, str]
    """Names of the checkpoint that an optimizer of this rank would not understand: unexpected, whatever other ranks
    say. Each with what is to be told of it."""
    values: dict[str, object]
    """Plain values by path, as saved."""
    finish: list[Callable[[], None]]
    """To be called in order, when every want is filled."""

    def complete(self) -> None:
        """To be called when every want is filled."""
        with _outside_inference():
            for action in self.finish:
                action()


def targets(
    state: object,
    saved: Saved,
    *,
    rename: Rename = None,
    only: Only = None,
    cast: bool = False,
    device: str | torch.device | None = None,
) -> Targets:
    """What is to be filled and done so that `state` becomes what was saved. Changes nothing yet.

    `device`: where what has no memory is given some.
    """
    asked = Asked(only, rename)
    filling = Filling(saved, asked, cast)
    walk = _Walk(filling, None if device is None else torch.device(device))
    with _outside_inference(), torch.no_grad():
        walk.collect(state, "", None)
        for path, module in walk.modules:
            walk.add_module(module, path)
        optimizers = OptimizerTargets(filling, walk.params)
        for path, optimizer in walk.optimizers:
            optimizers.add(optimizer, path)
    return Targets(
        filling.wants,
        filling.missing,
        [*asked.idle(), *filling.unexpected, *_never_used(filling)],
        filling.mismatched,
        filling.foreign,
        filling.values,
        filling.finish,
    )


@contextmanager
def _outside_inference() -> Iterator[None]:
    """Whatever the caller's mode: what is made in inference mode can never be updated outside of it, by no step."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


class _Walk:
    def __init__(self, filling: Filling, device: torch.device | None) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self.optimizers: list[tuple[str, torch.optim.Optimizer]] = []
        self.params = Params()
        self._filling = filling
        self._device = device

    def collect(self, node: object, path: str, setter: Setter) -> None:
        check_depth(node, path)
        if isinstance(node, (torch.Tensor, Sharded)):
            self.params.add(local_of(node), path)
            if isinstance(node, Sharded):
                self.params.by_hand[id(node.tensor)] = node
            self._filling.add_tensor(node, path)
        elif isinstance(node, PerRank):
            self.collect(node.value, path, None if setter is None else lambda value: setter(PerRank(value)))
        elif isinstance(node, nn.Module):
            self.modules.append((path, node))
        elif isinstance(node, torch.optim.Optimizer):
            refuse_optimizer(unwrapped(node), path)
            self.optimizers.append((path, torch_optimizer(node, path)))
        elif isinstance(node, torch.Generator):
            self._filling.add_generator(node, path)
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
            refuse_loader(node, path)
            self._filling.add_object(path, node.state_dict, loader_of(node))  # type: ignore[attr-defined]
        else:
            self._filling.add_value(path, setter)

    def add_module(self, module: nn.Module, path: str) -> None:
        made: dict[int, torch.Tensor] = {}
        state = list(named_state(module, path))  # what a hook of it puts in the place of parameters counts
        owners = owners_of(module)
        for name, value in state:
            full = f"{path}/{name}" if path else name
            if not isinstance(value, torch.Tensor) or is_extra_state(name):
                continue
            self.params.add(value, full)
            if value.device.type != "meta":
                self._filling.add_tensor(value, full)
            elif self._filling.wanted(full):
                self._materialise(value, full, owners.get(id(value), []), made)
        self._add_extra_states(module, path)

    def _materialise(
        self, meta: torch.Tensor, name: str, owners: Sequence[tuple[nn.Module, str]], made: dict[int, torch.Tensor]
    ) -> None:
        """A parameter or buffer without memory is given some, and is put into its module when it is filled."""
        new = made.get(id(meta))
        if new is None:
            device = self._device or home_of(meta)
            if is_subclass(meta):
                new = like(meta, lambda inner: torch.empty_like(inner, device=device))
            else:
                new = torch.empty_like(meta, device=device)
            if isinstance(meta, nn.Parameter):
                new = nn.Parameter(new, requires_grad=meta.requires_grad)
            made[id(meta)] = new  # one for all its names, so that what was tied stays tied
        self._filling.add_tensor(new, name)
        if not self._filling.fills(new):
            return  # it stays without memory rather than get some that nothing was read into
        for module, attribute in owners:
            self._filling.finish.append(_assigner(module, attribute, new))

    def _add_extra_states(self, module: nn.Module, path: str) -> None:
        for name, submodule in module.named_modules(remove_duplicate=False):
            if type(submodule).get_extra_state is not nn.Module.get_extra_state:
                prefix = f"{name}." if name else ""
                key = join_module(path, _canonical_prefix(module, prefix) + "_extra_state")
                self._filling.add_object(key, submodule.get_extra_state, submodule.set_extra_state)


def _never_used(filling: Filling) -> Iterator[str]:
    """Everything saved that nobody took."""
    saved = filling.saved
    trees: list[str] = []
    for tree in sorted(f"{path}/" for path in saved.objects):
        if not trees or not tree.startswith(trees[-1]):
            trees.append(tree)  # none begins with another, so the one before a name tells
    for name in (*saved.tensors, *saved.values, *saved.objects):
        # what belongs to an object that is loaded as a whole is taken, or not, with it
        if name not in filling.used and filling.asked.expects(name):
            before = bisect_left(trees, name)
            if not before or not name.startswith(trees[before - 1]):
                yield name


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


def _assigner(module: nn.Module, attribute: str, new: torch.Tensor) -> Callable[[], None]:
    def assign() -> None:
        if isinstance(new, nn.Parameter):
            module._parameters[attribute] = new
        else:
            module._buffers[attribute] = new

    return assign
