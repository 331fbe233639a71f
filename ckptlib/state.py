"""The state of a training job as a flat list of named tensors and values, and back.

State is any nesting of dict, list and tuple that holds tensors, plain values, modules, optimizers, generators, and
objects with `state_dict()` and `load_state_dict()`. `flatten` calls each `state_dict()` once, on the caller's thread.
With `ckptlib.targets` and `adapters/dcp` the only place that knows DTensor.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import placement_types as torch_placements

from ckptlib import dtypes, sharding, values
from ckptlib.box import Box
from ckptlib.errors import UnsupportedState
from ckptlib.layout import ByHand, Mesh, Placed
from ckptlib.layout import PerRank as HeldPerRank
from ckptlib.modules import is_extra_state, named_state
from ckptlib.values import Json


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks state of which every rank has its own: `{"cache": PerRank(tensor_or_object_or_dict)}`."""

    value: object


@dataclass(frozen=True, slots=True)
class Sharded:
    """Marks a tensor as one box, cut by hand, of a larger one: `Sharded(local, offset=(512, 0), shape=(1024, 64))`."""

    tensor: torch.Tensor
    """The box's elements."""
    offset: tuple[int, ...]
    """Where the box begins in global coordinates."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Held as an ordinary tensor: a replica, if its digest says so on every rank that has the name."""


Held = Placed | HeldPerRank | ByHand | Plain


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of the state, as this rank holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Global."""
    held: Held
    pieces: tuple[tuple[Box, torch.Tensor], ...]
    """What this rank has: boxes in global coordinates, each with a view of the same shape."""
    owner: torch.optim.Optimizer | None
    """The optimizer whose step is the only writer of this tensor; None where there is none known."""


@dataclass
class Flat:
    """A whole state, flattened."""

    leaves: list[Leaf] = field(default_factory=list)
    values: dict[str, Json] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    objects: dict[str, Json] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    """By path."""


def join(path: str, key: object) -> str:
    """The path of an entry. Slashes in keys are escaped, so two paths are never the same text."""
    text = str(key).replace("%", "%25").replace("/", "%2F")
    return f"{path}/{text}" if path else text


Memo = dict[str, tuple[object, object, Leaf]]
"""By name: the tensor, where and what its local data is, and the leaf made of it at the last pass."""


@torch.no_grad()
def flatten(state: object, memo: Memo | None = None) -> Flat:
    """All tensors and values of `state`, on this rank. Reads no tensor's data.

    With the `memo` of an earlier pass, tensors that are still the same objects at the same address give the very same
    leaves, so that a caller can tell by `is` what changed.

    Raises UnsupportedState, naming the path, for what cannot be saved.
    """
    walk = _Walk({} if memo is None else memo)
    walk.visit(state)
    for path, optimizer in walk.flat.optimizers.items():
        _flatten_optimizer(walk, path, optimizer)
    walk.forget_others()
    return walk.flat


class _Walk:
    """One pass over a state."""

    def __init__(self, memo: Memo) -> None:
        self.flat = Flat()
        self._memo = memo
        self.param_names: dict[int, str] = {}
        self.by_hand: dict[int, Sharded] = {}
        """By id of the tensor that each of them holds."""
        self.owners: dict[int, torch.optim.Optimizer] = {}
        self._names: set[str] = set()
        self._seen: dict[object, str] = {}
        self._modules: list[tuple[str, nn.Module, bool]] = []

    def visit(self, state: object) -> None:
        for optimizer in _optimizers_in(state):
            for group in optimizer.param_groups:
                self.owners.update((id(p), optimizer) for p in group["params"])
        self._collect(state, "", per_rank=False)
        for module_path, module, module_per_rank in self._modules:
            self._visit_module(module, module_path, module_per_rank)
        self._modules.clear()

    def _collect(self, node: object, path: str, per_rank: bool) -> None:
        if isinstance(node, PerRank):
            self._collect(node.value, path, per_rank=True)
        elif isinstance(node, (torch.Tensor, Sharded)):
            self.add_tensor(node, path, per_rank)
        elif isinstance(node, nn.Module):
            self._modules.append((path, node, per_rank))
        elif isinstance(node, torch.optim.Optimizer):
            refuse_optimizer(node, path)
            self.flat.optimizers[path] = node
        elif isinstance(node, torch.Generator):
            self.add_tensor(node.get_state(), path, per_rank=True)
        elif isinstance(node, Mapping):
            for key, value in node.items():
                self._collect(value, join(path, key), per_rank)
        elif isinstance(node, (list, tuple)) and type(node) in (list, tuple):
            for i, value in enumerate(node):
                self._collect(value, join(path, i), per_rank)
        elif is_stateful(node):
            refuse_optimizer(node, path)
            self.add_object(node.state_dict(), path, per_rank)  # type: ignore[attr-defined]
        else:
            self.add_value(node, path)

    def _visit_module(self, module: nn.Module, path: str, per_rank: bool) -> None:
        for name, value in named_state(module, path):
            full = f"{path}/{name}" if path else name
            if isinstance(value, torch.Tensor) and not is_extra_state(name):
                self.add_tensor(value, full, per_rank)
            else:
                self.add_object(value, full, per_rank)

    def add_tensor(self, tensor: torch.Tensor | Sharded, name: str, per_rank: bool) -> None:
        self._claim(name)
        known = self._memo.get(name)
        if known is None or known[0] is not tensor:
            refuse_tensor(tensor, name)
        self.param_names.setdefault(id(local_of(tensor)), name)
        if isinstance(tensor, Sharded):
            self.by_hand[id(tensor.tensor)] = tensor
        key = _identity(tensor)
        if key is not None and not per_rank:
            first = self._seen.setdefault(key, name)
            if first != name:
                self.flat.aliases[name] = first
                return
        leaf = self._leaf(tensor, name, per_rank)
        if leaf is not None:
            self.flat.leaves.append(leaf)

    def _leaf(self, tensor: torch.Tensor | Sharded, name: str, per_rank: bool) -> Leaf | None:
        owner = self.owners.get(id(local_of(tensor)))
        place = _place(tensor)
        known = self._memo.get(name)
        if known is not None and known[0] is tensor and known[1] == place:
            leaf = known[2]
            if leaf.owner is owner and isinstance(leaf.held, HeldPerRank) == per_rank:
                return leaf
        made = leaf_of(tensor, name, per_rank, owner)
        if made is not None:
            self._memo[name] = (tensor, place, made)
        return made

    def forget_others(self) -> None:
        """Lets go of tensors that the state no longer has."""
        for name in self._memo.keys() - self._names:
            del self._memo[name]

    def add_value(self, value: object, path: str) -> None:
        self._claim(path)
        self.flat.values[path] = values.encode(value, path)

    def add_object(self, state: object, path: str, per_rank: bool) -> None:
        """An object's state: a tree to be rebuilt when it holds tensors, else one value."""
        if has_tensor(state):
            self.flat.objects[path] = self._tree(state, path, per_rank)
        else:
            self.add_value(state, path)

    def _tree(self, node: object, path: str, per_rank: bool) -> Json:
        if isinstance(node, PerRank):
            return self._tree(node.value, path, per_rank=True)
        if isinstance(node, (torch.Tensor, Sharded)):
            self.add_tensor(node, path, per_rank)
            return "tensor"
        if not has_tensor(node):
            self.add_value(node, path)
            return "value"
        kind = _TREES.get(type(node))
        if kind is None:
            raise UnsupportedState(
                f"{path}: a {type(node).__module__}.{type(node).__qualname__} that holds tensors would come back as "
                "something else; let state_dict() give dict, OrderedDict, list or tuple"
            )
        if isinstance(node, Mapping):
            pairs = [[values.encode(k, path), self._tree(v, join(path, k), per_rank)] for k, v in node.items()]
            return {kind: pairs}  # type: ignore[dict-item]
        return {kind: [self._tree(v, join(path, i), per_rank) for i, v in enumerate(node)]}  # type: ignore[arg-type, var-annotated]

    def _claim(self, name: str) -> None:
        if name in self._names:
            raise UnsupportedState(f"two entries of the state are both called {name!r}; rename one of them")
        self._names.add(name)


_TREES: dict[type, str] = {dict: "dict", OrderedDict: "odict", list: "list", tuple: "tuple"}


def _optimizers_in(node: object) -> Iterator[torch.optim.Optimizer]:
    """Before any tensor is looked at, since a tensor may stand before its owner."""
    if isinstance(node, PerRank):
        yield from _optimizers_in(node.value)
    elif isinstance(node, torch.optim.Optimizer):
        yield node
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _optimizers_in(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _optimizers_in(value)


def local_of(tensor: torch.Tensor | Sharded) -> torch.Tensor:
    """The tensor that an optimizer would know."""
    return tensor.tensor if isinstance(tensor, Sharded) else tensor


def is_stateful(node: object) -> bool:
    """Whether an object gives and takes its state."""
    return callable(getattr(node, "state_dict", None)) and callable(getattr(node, "load_state_dict", None))


def has_tensor(node: object) -> bool:
    """Whether a tensor lies anywhere in a nesting of containers."""
    if isinstance(node, (torch.Tensor, Sharded, PerRank)):
        return True
    if isinstance(node, Mapping):
        return any(has_tensor(v) for v in node.values())
    return isinstance(node, (list, tuple)) and any(has_tensor(v) for v in node)


# Tensors


def leaf_of(
    tensor: torch.Tensor | Sharded, name: str, per_rank: bool, owner: torch.optim.Optimizer | None
) -> Leaf | None:
    """The tensor as this rank holds it, or None when it stands outside of the tensor's mesh."""
    if isinstance(tensor, Sharded):
        local = _checked(tensor.tensor, name)
        box = Box(tuple(tensor.offset), tuple(local.shape))
        if len(tensor.shape) != box.ndim or not box.within(Box.whole(tensor.shape)):
            raise UnsupportedState(f"{name}: Sharded box {box} does not lie in a tensor of shape {tuple(tensor.shape)}")
        pieces = ((box, local),) if box.numel else ()
        return Leaf(name, dtype_name(local), tuple(tensor.shape), ByHand(), pieces, owner)
    if isinstance(tensor, DTensor):
        if per_rank:
            raise UnsupportedState(f"{name}: a DTensor cannot be PerRank; give tensor.to_local()")
        return _leaf_of_dtensor(tensor, name, owner)
    tensor = _checked(tensor, name)
    shape = tuple(tensor.shape)
    pieces = ((Box.whole(shape), tensor),) if tensor.numel() else ()
    return Leaf(name, dtype_name(tensor), shape, HeldPerRank() if per_rank else Plain(), pieces, owner)


def _leaf_of_dtensor(tensor: DTensor, name: str, owner: torch.optim.Optimizer | None) -> Leaf | None:
    local = _checked(tensor.to_local(), name)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    held = Placed(mesh_of(tensor), placements_of(tensor, name), None)
    shape = tuple(tensor.shape)
    found = sharding.pieces(shape, held.mesh.shape, held.placements, tuple(coordinate))
    expected = sharding.shape_local(shape, held.mesh.shape, held.placements, tuple(coordinate))
    if tuple(local.shape) != expected:
        raise UnsupportedState(
            f"{name}: local shape {tuple(local.shape)} is not the {expected} that {tensor.placements} of {shape} give; "
            "cut it by hand: Sharded(local, offset, shape)"
        )
    whole = len(found) == 1 and found[0].local.shape == expected
    pieces = tuple((p.box, local if whole else local[p.local.slices()]) for p in found)
    return Leaf(name, dtype_name(tensor), shape, held, pieces, owner)


def mesh_of(tensor: DTensor) -> Mesh:
    """The tensor's mesh, by global ranks."""
    ranks = tensor.device_mesh.mesh
    return Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))


def placements_of(tensor: DTensor, name: str) -> tuple[sharding.Placement, ...]:
    """DTensor's placements in our words. Raises UnsupportedState for Partial and for what nobody taught us."""
    return tuple(_placement(p, tensor.ndim, name) for p in tensor.placements)


def _placement(placement: Any, ndim: int, name: str) -> sharding.Placement:
    if isinstance(placement, torch_placements.Replicate):
        return sharding.Replicate()
    if isinstance(placement, torch_placements._StridedShard):
        return sharding.StridedShard(placement.dim % ndim, int(placement.split_factor))
    if isinstance(placement, torch_placements.Shard):
        return sharding.Shard(placement.dim % ndim)
    raise UnsupportedState(
        f"{name}: placement {placement!r} has no value on disk; redistribute to Replicate() or Shard()"
    )


_TENSOR_TYPES = (torch.Tensor, nn.Parameter)


def refuse_tensor(tensor: torch.Tensor | Sharded, name: str) -> None:
    """Raises UnsupportedState for a kind of tensor of which not even the shape or address can be asked."""
    if not isinstance(tensor, DTensor):
        _checked(tensor.tensor if isinstance(tensor, Sharded) else tensor, name)


def _checked(tensor: torch.Tensor, name: str) -> torch.Tensor:
    if is_lazy(tensor):
        raise UnsupportedState(f"{name}: is not initialised yet; run one forward pass before it is saved or loaded")
    if type(tensor) not in _TENSOR_TYPES and not _is_buffer(tensor):
        raise UnsupportedState(
            f"{name}: {type(tensor).__module__}.{type(tensor).__qualname__} is a tensor subclass that ckptlib does not "
            "know; give the plain tensors it is made of"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedState(f"{name}: only dense tensors can be saved, this one is {kind}; give its parts")
    if tensor.device.type == "meta":
        raise UnsupportedState(
            f"{name}: is on the meta device and has no memory; only the tensors of a module are given some by load, "
            "for others make them with torch.empty(..., device=...)"
        )
    if not dtypes.known(dtype_name(tensor)):
        raise UnsupportedState(f"{name}: dtype {tensor.dtype} is unknown to ckptlib; give tensor.view(torch.uint8)")
    return tensor


def _is_buffer(tensor: torch.Tensor) -> bool:
    """nn.Buffer is a factory: what it makes is a torch.Tensor with a mark; a functional wrapper is not."""
    return type(tensor) is getattr(nn, "Buffer", None)


def _place(tensor: torch.Tensor | Sharded) -> object:
    """Changes when the tensor gets other memory, or another view of it."""
    local = local_of(tensor)
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.data_ptr(), local.shape, local.stride(), local.dtype


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or buffer of a lazy module that has not seen its first input."""
    return isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's name without the module: "bfloat16"."""
    return str(tensor.dtype).removeprefix("torch.")


def _identity(tensor: torch.Tensor | Sharded) -> object:
    """What two names of one tensor have in common; None where nothing can be said.

    A parameter is known by itself, since an empty shard has no memory to be known by.
    """
    if isinstance(tensor, Sharded):
        return (id(tensor.tensor), tuple(tensor.offset), tuple(tensor.shape))
    if isinstance(tensor, (nn.Parameter, DTensor)):
        return id(tensor)
    if tensor.numel() == 0:
        return None
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


# Optimizers


_REFUSED_OPTIMIZERS = {
    ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"): "use FSDP2, or a plain optimizer",
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"): "use FSDP2",
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"): "use FSDP2",
    ("deepspeed.runtime.bf16_optimizer", "BF16_Optimizer"): "use FSDP2",
    ("megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"): "use FSDP2",
    ("megatron.core.optimizer.optimizer", "ChainedOptimizer"): "use FSDP2",
}


def refuse_optimizer(optimizer: object, path: str) -> None:
    """Raises UnsupportedState for optimizers whose state cannot be named by parameter; not all are torch's."""
    for cls in type(optimizer).__mro__:
        remedy = _REFUSED_OPTIMIZERS.get((cls.__module__, cls.__name__))
        if remedy is not None:
            raise UnsupportedState(f"{path}: {cls.__name__} flattens its state across ranks: {remedy}")


def group_path(path: str, index: int) -> str:
    """Where the hyper-parameters of a group are kept."""
    return f"{path}/@group.{index}" if path else f"@group.{index}"


def state_path(path: str, param_name: str, key: object) -> str:
    """Where one entry of a parameter's optimizer state is kept."""
    return join(f"{path}/{param_name}" if path else param_name, key)


def names_of_params(optimizer: torch.optim.Optimizer, param_names: Mapping[int, str]) -> list[list[str]]:
    """By group: the names of its parameters.

    Those of the modules in the same state; else those the optimizer was given (`named_parameters()`); else positions.
    """
    names = []
    for i, group in enumerate(optimizer.param_groups):
        given: Sequence[str] = group.get("param_names") or [f"@{i}.{j}" for j in range(len(group["params"]))]
        names.append([param_names.get(id(p), given[j]) for j, p in enumerate(group["params"])])
    return names


def hyper_parameters(group: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """What a parameter group holds beside its parameters."""
    return ((key, value) for key, value in group.items() if key not in ("params", "param_names"))


def _flatten_optimizer(walk: _Walk, path: str, optimizer: torch.optim.Optimizer) -> None:
    names = names_of_params(optimizer, walk.param_names)
    walk.flat.objects[path] = {"optimizer": {"groups": names}}  # type: ignore[dict-item]
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key in optimizer.state:
        if id(key) not in known:
            raise UnsupportedState(
                f"{path}: optimizer state is kept under {str(key)[:40]!r}, which is no parameter of its groups"
            )
    for i, group in enumerate(optimizer.param_groups):
        plain: dict[str, object] = {}
        for option, value in hyper_parameters(group):
            if isinstance(value, torch.Tensor):
                walk.add_tensor(value, join(group_path(path, i), option), per_rank=False)
            elif has_tensor(value):  # betas may be tensors
                walk.add_object(value, join(group_path(path, i), option), per_rank=False)
            else:
                plain[option] = value
        walk.add_value(plain, group_path(path, i))
        for name, param in zip(names[i], group["params"], strict=True):
            for entry, content in optimizer.state.get(param, {}).items():
                if not isinstance(entry, str):
                    raise UnsupportedState(f"{path}/{name}: optimizer state has the key {entry!r}; keys must be text")
                cut = cut_like(walk.by_hand.get(id(param)), content)
                _flatten_optimizer_entry(walk, state_path(path, name, entry), cut, optimizer)


def cut_like(param: Sharded | None, value: object) -> object:
    """Optimizer state of a parameter that was cut by hand: what has its shape was cut like it."""
    if param is None or not isinstance(value, torch.Tensor) or value.shape != param.tensor.shape:
        return value
    return Sharded(value, param.offset, param.shape)


def _flatten_optimizer_entry(walk: _Walk, path: str, value: object, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(value, (torch.Tensor, Sharded)):
        walk.owners[id(local_of(value))] = optimizer
        walk.add_tensor(value, path, per_rank=False)
    else:
        walk.add_object(value, path, per_rank=False)
