"""Flattens the state of a training job to a list of named tensors and values.

State is any nesting of dict, list and tuple that holds tensors, plain values, modules, optimizers, generators, and
objects with `state_dict()` and `load_state_dict()`. `flatten` calls each `state_dict()` once, on the caller's thread,
except that of a module which would return what it did before: see `ckptlib.state.structure`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, cast

import torch
from torch import nn
from typing_extensions import override

from ckptlib.errors import UnsupportedState
from ckptlib.format.paths import join, segment_of
from ckptlib.format.values import Json
from ckptlib.state.collector import Collector, Flat, Part, has_tensor
from ckptlib.state.entries import Entries, entries_of
from ckptlib.state.hidden_state import refuse_beyond_entries
from ckptlib.state.leaf import PLAIN, Sharded, is_sharded, refuse_freed
from ckptlib.state.made_tensors import lost
from ckptlib.state.memo import Fingerprint, KnownModule, KnownOptimizer, Memo, Section, Trace
from ckptlib.state.modules import made_names, named_state
from ckptlib.state.nests import is_nest
from ckptlib.state.optimizer_tensors import tensors_in, whole_dtensors
from ckptlib.state.optimizers import (
    cut_like,
    group_path,
    hyper_parameters,
    names_of_params,
    refuse_strangers,
    saying_how,
    state_path,
    warn_of_positions,
    warn_of_unsaved,
)
from ckptlib.state.owners import frozen_in, owned_in, owners_of, written_in_forward
from ckptlib.state.rng import RngState
from ckptlib.state.structure import same, structure_of
from ckptlib.state.subclasses import any_subclass, is_subclass
from ckptlib.state.visitor import SCALARS, Visitor, has_own_state
from ckptlib.state.wrappers import is_extra_state

NO_OWNERS: Mapping[int, torch.optim.Optimizer] = {}


@torch.no_grad()
def flatten(state: object, memo: Memo | None = None, owners: Mapping[int, torch.optim.Optimizer] = NO_OWNERS) -> Flat:
    """Returns all tensors and values of `state`, on this rank. Reads no tensor's data.

    With the `memo` of an earlier pass, tensors that are still the same objects at the same address give the same leaf
    objects, and if all of them are, the same list of leaves: a caller can tell by `is` what changed.

    `owners`: the only writer of a tensor of the state, by the tensor's id, if the state does not have that optimizer
    itself.

    Raises UnsupportedState, naming the path, for anything that cannot be saved.
    """
    memo = Memo() if memo is None else memo
    owned = owned_in(state)
    frozen = frozen_in(owned)
    if not same(owned, memo.owned) or owners != memo.given or frozen != memo.frozen:
        memo.owned, memo.owners, memo.given = owned, {**owners, **owners_of(owned)}, dict(owners)
        memo.written, memo.frozen = memo.owners.keys() & written_in_forward(owned), frozen
        memo.sections.clear()
    alone = dict(memo.owners)
    for number in memo.written | frozen:
        del alone[number]
    walk = _Walk(memo, alone)
    walk.visit(state, False)
    flat, trace = walk.flat, walk.findings.trace()
    if walk.asked:
        for leaf in chain(trace.leaves, *(section.leaves for section in trace.sections)):
            for _, piece in leaf.pieces:
                refuse_freed(piece, leaf.name)
    if trace.is_that_of(memo.trace):
        flat.leaves = memo.last
    else:
        found = walk.findings.joined()
        for name in memo.leaves.keys() - found.names.keys():  # what the state no longer has
            del memo.leaves[name]
        flat.leaves = memo.last if same(found.leaves, memo.last) else found.leaves
        flat.lends = any(map(attrgetter("lent"), found.leaves))
        memo.last, memo.trace = ([], Trace([], [])) if flat.lends else (flat.leaves, trace)
    known: dict[tuple[str, bool], Any]
    for known in (memo.sections, memo.modules, memo.optimizers):
        for key in known.keys() - walk.sections:
            del known[key]
    return flat


SECTION_FROM = 16
"""From this many tensors on, a dict is compared as a section."""


class _Walk(Visitor[bool], Collector):
    """One pass over a state, or over a section of it. Hands down to entries whether every rank has its own."""

    def __init__(self, memo: Memo, owners: dict[int, torch.optim.Optimizer]) -> None:
        """`owners`: the optimizer that is the only writer of each tensor, by the tensor's id."""
        Visitor.__init__(self)
        Collector.__init__(self, memo, owners)
        self.sections: set[tuple[str, bool]] = set()
        self.asked = False
        """Whether a `state_dict()` that returns tensors was called, even within an object: FSDP2 shards parameters
        again in it, and frees the memory of whole ones, which may have been found by then. The random generators' does
        not count: it is in every save and asks no module."""

    @override
    def below_per_rank(self, per_rank: bool) -> bool:
        return True

    @override
    def below(self, container: object, per_rank: bool) -> Callable[[object], bool]:
        return lambda key: per_rank

    @override
    def add_entries(self, node: Mapping[object, object], path: str, per_rank: bool) -> bool:
        if path and has_own_state(node):
            given = node.state_dict()  # type: ignore[attr-defined]
            self.asked = self.asked or has_tensor(given)
            refuse_beyond_entries(node, given, path)
        kinds = {*map(type, node)}
        if len(kinds) > 1:
            _refuse_same_text(node, path)
        if len(node) < SECTION_FROM or {*map(type, node.values())} - {*PLAIN} or kinds != {str}:
            return False
        keys, tensors = list(node), cast(list[torch.Tensor], list(node.values()))

        def add(walk: _Walk) -> None:
            for key, tensor in zip(keys, tensors, strict=True):
                walk.add_tensor(tensor, join(path, key), per_rank)

        self._add_section((path, per_rank), Fingerprint(keys, (), tensors), add)
        return True

    @override
    def add_nest(self, node: object, path: str, per_rank: bool) -> bool:
        if not is_nest(node):
            return False
        self.add_whole(dict(node) if isinstance(node, defaultdict) else node, path)
        return True

    @override
    def add_any_tensor(self, tensor: torch.Tensor | Sharded, path: str, per_rank: bool) -> None:
        if is_subclass(tensor):
            self.add_subclass(tensor, path, per_rank)
        else:
            self.add_tensor(tensor, path, per_rank)

    @override
    def add_generator(self, generator: torch.Generator, path: str) -> None:
        self.add_tensor(generator.get_state(), path, per_rank=True)

    @override
    def add_stateful(self, node: Any, path: str, per_rank: bool) -> None:
        state = node.state_dict()
        self.asked = self.asked or (has_tensor(state) and not isinstance(node, RngState))
        self.add_object(state, path, per_rank)

    @override
    def add_plain(self, value: object, path: str, per_rank: bool) -> None:
        self.add_value(value, path)

    @override
    def add_module(self, module: nn.Module, path: str, per_rank: bool) -> None:
        key = path, per_rank
        known = self._memo.modules.get(key)
        if known is not None and known.structure.stands(module) and self._stays(key, known.sight):
            self._take(key, _adding(known.sight))
            return
        self._memo.modules.pop(key, None)
        names: list[str] = []
        tensors: list[torch.Tensor] = []
        others: list[tuple[str, object]] = []
        made: list[tuple[str, torch.Tensor]] = []
        state = named_state(module, path)
        self.asked = True
        made_by_hooks = made_names(module)
        for name, value in state:
            full = f"{path}/{name}" if path else name
            if name in made_by_hooks and isinstance(value, torch.Tensor):
                made.append((full, value))
            elif isinstance(value, torch.Tensor) and not is_extra_state(name):
                names.append(full)
                tensors.append(value)
            elif name in made_by_hooks or is_extra_state(name):
                others.append((full, value))
            else:
                raise lost(value, full)
        own = [per_rank] * len(names)
        is_made_of_others = any_subclass(tensors)
        if is_made_of_others:
            parts = list(chain.from_iterable(self.parts(t, n, per_rank) for t, n in zip(tensors, names, strict=True)))
            tensors, names, own = [p.tensor for p in parts], [p.name for p in parts], [p.per_rank for p in parts]
        sight = Fingerprint([names, own], (), tensors)
        self._add_section(key, sight, _adding(sight))
        if not is_made_of_others and not others and not made:
            structure = structure_of(module)
            if structure is not None:
                self._memo.modules[key] = KnownModule(structure, self._memo.sections[key].sight)
        for name, value in others:
            self.add_object(value, name, per_rank)
        for name, tensor in made:
            self.add_made(tensor, name, per_rank)

    def _add_section(self, key: tuple[str, bool], sight: Fingerprint, add: Callable[[_Walk], None]) -> None:
        """Takes what `add` finds, or what it found at the last pass.

        `add` gets a walk of its own, so that what it finds can be kept, unless that has something in common with
        earlier findings.
        """
        known = self._memo.sections.get(key)
        if known is None or not known.shows(sight):
            alone = _Walk(self._memo, self.owners)
            add(alone)
            self._memo.sections[key] = Section(sight, alone.findings.joined())
        self._take(key, add)

    def _stays(self, key: tuple[str, bool], sight: Fingerprint) -> bool:
        """Returns whether a section was made of this fingerprint, and its tensors are still where they were."""
        known = self._memo.sections.get(key)
        return known is not None and known.sight is sight and known.shows(sight)

    def _take(self, key: tuple[str, bool], add: Callable[[_Walk], None]) -> None:
        self.sections.add(key)
        made = self._memo.sections[key].made
        if not self.findings.take(made):  # ties, or names that occur twice
            add(self)

    @override
    def add_optimizer(self, optimizer: torch.optim.Optimizer, path: str, per_rank: bool) -> None:
        self.refuse_hidden(optimizer, path)
        self.flat.optimizers[path] = optimizer
        key, entries = (path, per_rank), entries_of(optimizer)
        own = set() if per_rank else self._own_params()
        known = self._memo.optimizers.pop(key, None)
        if known is not None and (own or not (self._stands(known, entries) and self._stays(key, known.sight))):
            known = None
        described: dict[str, Json]
        if known is not None:
            names, described = known.names, known.described
        else:
            names = names_of_params(optimizer, self.findings.joined().param_names, path)
            warn_of_positions(optimizer, names, path, "saved")
            params = [param for group in optimizer.param_groups for param in group["params"]]
            refuse_strangers(optimizer, params, path)
            self._look_for(params, names, optimizer, path)
            described = {}
        self.flat.objects[path] = cast(Json, described)
        for i, group in enumerate(optimizer.param_groups):
            self._add_hyper_parameters(group, group_path(path, i), per_rank)

        def content(*, tensors: bool) -> Iterator[tuple[str, torch.Tensor, Any, bool]]:
            """Yields the tensors of the state, or everything else."""
            params = (param for group in optimizer.param_groups for param in group["params"])
            for name, param in zip(chain.from_iterable(names), params, strict=True):
                is_own = per_rank or id(param) in own
                for key, value in optimizer.state.get(param, {}).items():
                    if isinstance(value, torch.Tensor) == tensors:
                        yield state_path(path, name, key), param, value, is_own

        taken: dict[str, list[Part]] = {}
        """The inner tensors of subclasses in the state, by name."""

        def add(walk: _Walk) -> None:
            for name, param, value, is_own in content(tensors=True):
                if name in taken:
                    for part in taken[name]:
                        walk.owners[id(part.tensor)] = optimizer
                        walk.add_tensor(*part)
                else:
                    walk.owners[id(value)] = optimizer
                    walk.add_tensor(cut_like(self.by_hand.get(id(param)), value), name, is_own)

        if known is not None:
            self._memo.optimizers[key] = known
            self._take(key, add)
            return
        held = optimizer.state.values()
        contents = [value for entry in held for value in entry.values()]
        tensors = [value for value in contents if isinstance(value, torch.Tensor)]
        mixed = len(tensors) < len(contents)
        if mixed:
            keys = [[key for key, value in entry.items() if isinstance(value, torch.Tensor)] for entry in held]
        else:
            keys = list(map(list, held))
        if any_subclass(tensors):
            for name, param, value, is_own in content(tensors=True):
                if is_subclass(value) and is_subclass(cut_like(self.by_hand.get(id(param)), value)):
                    taken[name] = self.take_apart(value, name, is_own)
            inner = list(chain.from_iterable(taken.values()))
            tensors = [*(t for t in tensors if not is_subclass(t)), *(part.tensor for part in inner)]
            keys.append([(part.name, part.per_rank) for part in inner])
        if self.by_hand:
            add(self)
        else:
            self._add_section(key, Fingerprint([names, keys, own], [*params, *optimizer.state], tensors), add)
            is_named = None not in self.findings.names_of(params)
            if entries is not None and is_named and not mixed and not taken and not own:
                sight = self._memo.sections[key].sight
                self._memo.optimizers[key] = KnownOptimizer(entries, sight, names, described)
        if mixed:
            with saying_how(optimizer):
                for name, param, value, is_own in content(tensors=False):
                    if type(value) not in SCALARS and not is_own and (id(param) in self.by_hand or is_sharded(param)):
                        # then a plain tensor that differs between ranks is a part, but nothing tells of what
                        self.owners.update((id(tensor), optimizer) for _, tensor in tensors_in(value, name))
                    self.add_object(value, name, is_own)
        described["optimizer"] = _describe(optimizer, names)  # last: endless state has been refused by its name

    def _look_for(
        self, params: Sequence[torch.Tensor], names: list[list[str]], optimizer: torch.optim.Optimizer, path: str
    ) -> None:
        """Warns if the state has only a part of an optimizer's parameters."""
        found = self.findings.joined()
        named = zip(chain.from_iterable(names), params, strict=True)
        others = [(name, param) for name, param in named if id(param) not in found.param_names]
        if 0 < len(others) < len(params):
            saved = (tensor for leaf in found.leaves for _, tensor in leaf.pieces)
            warn_of_unsaved(optimizer, others, [module for module, _, _ in self._modules], saved, path)

    def _own_params(self) -> set[int]:
        """Returns the ids of optimizers' parameters that are marked as each rank's own. Then what an optimizer keeps
        for them is each rank's own, too."""
        return {number for number in self.findings.own() if number in self._memo.owners}

    def _stands(self, known: KnownOptimizer, entries: Entries | None) -> bool:
        """Returns whether the names and tensors of an optimizer are as they were."""
        return (
            entries is not None
            and not self.by_hand
            and known.entries.shows(entries)
            and self.findings.names_of(entries.params) == [*chain.from_iterable(known.names)]
        )

    def _add_hyper_parameters(self, group: Mapping[str, object], path: str, per_rank: bool) -> None:
        plain: dict[str, object] = {}
        for option, value in hyper_parameters(group):
            if isinstance(value, torch.Tensor):
                self.add_tensor(value, join(path, option), per_rank)
            elif has_tensor(value):  # betas may be tensors
                self.add_object(value, join(path, option), per_rank)
            else:
                plain[option] = value
        self.add_value(plain, path)


def _refuse_same_text(node: Mapping[object, object], path: str) -> None:
    """Raises UnsupportedState for a dict with two keys of the same text, as 1 and "1": entries below one would be found
    below the other."""
    if is_nest(node):
        return
    keys: dict[str, object] = {}
    for key in node:
        other = keys.setdefault(segment_of(key), key)
        if other is not key:
            raise UnsupportedState(
                f"two entries of the state have the same name {join(path, key)!r}: a dict has both {other!r} and "
                f"{key!r} as keys; rename one of them"
            )


def _adding(sight: Fingerprint) -> Callable[[_Walk], None]:
    """Returns a function that adds the tensors of a module."""
    names, own = cast(Sequence[Sequence[Any]], sight.names)

    def add(walk: _Walk) -> None:
        for part in zip(sight.tensors, names, own, strict=True):
            walk.add_tensor(*part)

    return add


def _describe(optimizer: torch.optim.Optimizer, names: list[list[str]]) -> Json:
    """Returns what a layout says of an optimizer: the same on ranks that hold the same."""
    orders = sorted(map(list, {*map(tuple, optimizer.state.values())}), key=str)
    dtensors = whole_dtensors(optimizer, chain.from_iterable(names))
    described: dict[str, Any] = {"groups": names, "class": type(optimizer).__name__, "keys": orders}
    return cast(Json, {**described, "dtensors": dtensors} if dtensors else described)
