"""Leaves: one tensor of the state, as this rank holds it, and how it may be held.

Of state and loading, only this file, `places`, `subclasses`, `made_tensors`, `optimizer_tensors`, `beside`
and `match_optimizers` know DTensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from typing import Any, SupportsIndex
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import placement_types as torch_placements

from ckptlib.devices import accelerator
from ckptlib.errors import StateMismatch, UnsupportedState
from ckptlib.format import dtypes, sharding
from ckptlib.format.box import Box
from ckptlib.format.layout import ByHand, Mesh, OwnPerRank, Placed, TensorSpec
from ckptlib.state.places import own_part, place_of_plain


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks state of which every rank has its own: `{"cache": PerRank(tensor_or_object_or_dict)}`.

    Of parameters: what an optimizer beside it keeps for them is each rank's own, too.
    """

    value: object


@dataclass(frozen=True, slots=True)
class Sharded:
    """Marks a tensor as one box, cut by hand, of a larger one: `Sharded(local, offset=(512, 0), shape=(1024, 64))`.

    The boxes of all ranks make up the whole. They may overlap where they are equal, as halos are.
    """

    tensor: torch.Tensor
    """The box's elements."""
    offset: tuple[int, ...]
    """Where the box begins in global coordinates."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Held as an ordinary tensor: a replica, if its digest says so on every rank that has the name."""


Held = Placed | OwnPerRank | ByHand | Plain

_OWN, _REPLICA = OwnPerRank(), Plain()


@dataclass(frozen=True, slots=True)
class Leaf(TensorSpec):
    """One tensor of the state, as this rank holds it."""

    held: Held
    pieces: tuple[tuple[Box, torch.Tensor], ...]
    """What this rank has: boxes in global coordinates, each with a view of the same shape."""
    owner: torch.optim.Optimizer | None
    """The optimizer whose step is the only writer of this tensor; None where there is none known."""
    tied: str | None = None
    """The first name on this rank of this very tensor, where this is a further one; other ranks may not tie them."""
    frozen: bool = False
    """Whether it is a parameter that asks for no gradient."""
    lent: bool = False
    """Whether it may have been made for this pass alone: nothing keeps it beyond the snapshot. In a host's memory only
    what hooks of a module made counts: the memory of a device is scarce."""


def local_of(tensor: torch.Tensor | Sharded) -> torch.Tensor:
    """The tensor that an optimizer would know."""
    return tensor.tensor if isinstance(tensor, Sharded) else tensor


def storage_of(tensor: torch.Tensor) -> int | None:
    """Where the memory of this rank's part of it begins; None for a kind of tensor that need not have any."""
    local = own_part(tensor)
    return local.untyped_storage().data_ptr() if type(local) in PLAIN else None


def leaf_of(
    tensor: torch.Tensor | Sharded, name: str, per_rank: bool, owner: torch.optim.Optimizer | None
) -> Leaf | None:
    """The tensor as this rank holds it, or None when it stands outside of the tensor's mesh."""
    if isinstance(tensor, Sharded):
        local, box, shape = _cut_by_hand(tensor, name)
        pieces = ((box, local),) if box.numel else ()
        return Leaf(name, dtype_name(local), shape, ByHand(), pieces, owner, frozen=_is_frozen(tensor.tensor))
    if isinstance(tensor, DTensor):
        if per_rank:
            raise UnsupportedState(f"{name}: a DTensor cannot be PerRank; give tensor.to_local()")
        return _leaf_of_dtensor(tensor, name, owner)
    return leaf_of_plain(_checked(tensor, name), name, per_rank, owner)


def _cut_by_hand(tensor: Sharded, name: str) -> tuple[torch.Tensor, Box, tuple[int, ...]]:
    """What is there, its box, and the shape of the whole."""
    local = _checked(tensor.tensor, name)
    offset, shape = _integers(tensor.offset, name, "offset"), _integers(tensor.shape, name, "shape")
    if not len(offset) == len(shape) == local.dim():
        raise UnsupportedState(
            f"{name}: Sharded of a tensor of {local.dim()} dims has offset {offset} and shape {shape}; give a number "
            "for each dim"
        )
    box = Box(offset, tuple(local.shape))
    if not box.within(Box.whole(shape)):
        raise UnsupportedState(f"{name}: Sharded box {box} is not inside a tensor of shape {shape}")
    return local, box, shape


def _integers(given: Sequence[SupportsIndex], name: str, what: str) -> tuple[int, ...]:
    """As Python's own, which documents are made of: numpy's and torch's do as well."""
    try:
        if not any(isinstance(number, bool) for number in given):
            return tuple(map(index, given))
    except TypeError:  # it holds others, or is no sequence
        pass
    raise UnsupportedState(f"{name}: Sharded has {what} {given!r}; give a tuple of integers, one for each dim")


def leaf_of_plain(
    tensor: torch.Tensor, name: str, per_rank: bool, owner: torch.optim.Optimizer | None, tied: str | None = None
) -> Leaf:
    """As `leaf_of`, of an ordinary tensor that was not refused."""
    shape = tuple(tensor.shape)
    pieces = () if 0 in shape else ((_whole(shape), tensor),)
    held = _OWN if per_rank else _REPLICA
    return Leaf(name, _name_of(tensor.dtype), shape, held, pieces, owner, tied, _is_frozen(tensor))


@lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Box:
    """One object for all tensors of a shape: there may be thousands of small ones."""
    return Box.whole(shape)


def _leaf_of_dtensor(tensor: DTensor, name: str, owner: torch.optim.Optimizer | None) -> Leaf | None:
    local = _checked(tensor.to_local(), name)
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    held = Placed(mesh_of(tensor), placements_of(tensor, name), None)
    shape = tuple(tensor.shape)
    found, expected = _pieces_of(shape, held.mesh.shape, held.placements, tuple(coordinate))
    if tuple(local.shape) != expected:
        raise UnsupportedState(
            f"{name}: expected local shape {expected} from {tensor.placements} of {shape}, got {tuple(local.shape)}; "
            "describe the shard yourself: Sharded(local, offset, shape)"
        )
    whole = len(found) == 1 and found[0].local.shape == expected
    pieces = tuple((p.box, local if whole else local[p.local.slices()]) for p in found)
    return Leaf(name, dtype_name(tensor), shape, held, pieces, owner, frozen=_is_frozen(tensor))


@lru_cache(maxsize=1024)  # layers are alike
def _pieces_of(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[sharding.Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[tuple[sharding.Piece, ...], tuple[int, ...]]:
    """What a coordinate holds, and the shape of its local tensor."""
    asked = shape, mesh_shape, placements, coordinate
    return sharding.pieces(*asked), sharding.shape_local(*asked)


def _is_frozen(tensor: torch.Tensor) -> bool:
    # by type first: to ask whether something is a parameter costs a frame of Python
    return type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def is_elsewhere(tensor: torch.Tensor | Sharded) -> bool:
    """Whether it is a DTensor, and this rank stands outside of its mesh."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor of which a rank has a part."""
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


def home_of(meta: torch.Tensor) -> torch.device:
    """Where a tensor without memory belongs."""
    if isinstance(meta, DTensor):
        return torch.device(meta.device_mesh.device_type)
    chosen = torch.get_default_device()  # the host, too, where nobody chose any
    return chosen if chosen.type != "cpu" else accelerator.available() or chosen


_meshes: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()
"""torch 2.13 computes the ranks of a mesh anew each time that it is asked: 40 us, of the 130 that a load took to find
the target of a DTensor."""


def mesh_of(tensor: DTensor) -> Mesh:
    """The tensor's mesh, by global ranks."""
    found = _meshes.get(tensor.device_mesh)
    if found is None:
        ranks = tensor.device_mesh.mesh
        found = _meshes[tensor.device_mesh] = Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))
    return found


def placements_of(tensor: DTensor, name: str) -> tuple[sharding.Placement, ...]:
    """DTensor's placements in our words. Raises UnsupportedState for Partial and for what nobody taught us."""
    return tuple(placement_of(p, tensor.ndim, name) for p in tensor.placements)


def placement_of(placement: Any, ndim: int, name: str) -> sharding.Placement:
    """As `placements_of`, of one axis of the mesh and a tensor of so many dims."""
    if isinstance(placement, torch_placements.Replicate):
        return sharding.Replicate()
    if isinstance(placement, torch_placements._StridedShard):
        return sharding.StridedShard(placement.dim % ndim, int(placement.split_factor))
    if isinstance(placement, torch_placements.Shard):
        return sharding.Shard(placement.dim % ndim)
    raise UnsupportedState(f"{name}: placement {placement!r} cannot be saved; redistribute to Replicate() or Shard()")


PLAIN = (torch.Tensor, nn.Parameter)
"""The types of nearly all tensors: what these are not, need not be asked."""


def refuse_tensor(tensor: torch.Tensor | Sharded, name: str) -> None:
    """Raises UnsupportedState for a kind of tensor of which not even the shape or address can be asked."""
    if isinstance(tensor, Sharded):
        _cut_by_hand(tensor, name)
    elif not isinstance(tensor, DTensor):
        _checked(tensor, name)


def _checked(tensor: torch.Tensor, name: str) -> torch.Tensor:
    known = type(tensor) in PLAIN  # first: to ask for a parameter's kind costs a frame of Python
    if not known and is_lazy(tensor):
        raise UnsupportedState(f"{name}: is not initialised yet; run one forward pass before you save or load it")
    if not known and not _is_buffer(tensor):
        raise UnsupportedState(
            f"{name}: {type(tensor).__module__}.{type(tensor).__qualname__} is a tensor subclass that ckptlib cannot "
            "take apart: it has no __tensor_flatten__, or is torch's own; save the plain tensors it is made of"
            f"{_or_what_is_trained(tensor)}"
        )
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)
        raise UnsupportedState(f"{name}: only dense tensors can be saved, this one is {kind}; save its parts")
    if tensor.is_meta:
        raise UnsupportedState(
            f"{name}: is on the meta device and has no memory. Call to_empty(device=...) of its module and initialize "
            "it, or make the tensor by torch.empty(..., device=...). Only ckptlib.load gives a module's tensors memory"
        )
    refuse_freed(tensor, name)
    if not _is_known(tensor.dtype):
        raise UnsupportedState(f"{name}: dtype {tensor.dtype} is unknown to ckptlib; save tensor.view(torch.uint8)")
    return tensor


def _or_what_is_trained(tensor: torch.Tensor) -> str:
    """The advice for a weight of a frozen base, such as bitsandbytes' Int8Params."""
    if not isinstance(tensor, nn.Parameter) or tensor.requires_grad:
        return ""
    return (
        ". Or, since it is frozen, save what is trained alone: {name: p for name, p in model.named_parameters() if "
        "p.requires_grad}"
    )


def refuse_freed(tensor: torch.Tensor, name: str) -> None:
    """Raises UnsupportedState for an ordinary tensor of which the shape is left, and no memory: to read it would end
    the process."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise UnsupportedState(
            f"{name}: its memory was freed, as FSDP2 frees that of a whole parameter once it is sharded again; give "
            "the module, or take parameters from it while they are sharded: module.reshard()"
        )


@lru_cache(maxsize=64)
def _is_known(dtype: torch.dtype) -> bool:
    return dtypes.known(_name_of(dtype))


def _is_buffer(tensor: torch.Tensor) -> bool:
    """nn.Buffer is a factory: what it makes is a torch.Tensor with a mark; a functional wrapper is not."""
    return type(tensor) is getattr(nn, "Buffer", None)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or buffer of a lazy module that has not seen its first input."""
    return type(tensor) not in PLAIN and isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))


@lru_cache(maxsize=64)
def torch_dtype(name: str) -> torch.dtype:
    """Raises StateMismatch for one that this torch does not have."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise StateMismatch(f"the checkpoint has dtype {name}; torch {torch.__version__} lacks it; use a newer one")
    return found


@lru_cache(maxsize=256)
def is_converted(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether torch makes the one of the other; it does of complex numbers, too, and drops their imaginary parts."""
    if saved == wanted or (saved.is_complex and not wanted.is_complex):
        return saved == wanted
    try:
        torch.empty(1, dtype=wanted, device="cpu").copy_(torch.empty(1, dtype=saved, device="cpu"))
    except NotImplementedError:  # for float4, say
        return False
    return True


def dtype_name(tensor: torch.Tensor) -> str:
    """torch's name without the module: "bfloat16"."""
    return _name_of(tensor.dtype)


@lru_cache(maxsize=64)
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def identity(tensor: torch.Tensor | Sharded) -> object:
    """What two names of one tensor have in common; None where nothing can be said.

    A parameter is known by itself, since an empty shard has no memory to be known by.
    """
    if isinstance(tensor, Sharded):
        return (id(tensor.tensor), tuple(tensor.offset), tuple(tensor.shape))
    if isinstance(tensor, (nn.Parameter, DTensor)):
        return id(tensor)
    return identity_of_plain(tensor, place_of_plain(tensor))


def identity_of_plain(tensor: torch.Tensor, at: tuple[object, ...]) -> object:
    """As `identity`, of one of `PLAIN` in its place."""
    if type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):  # the former is quicker to ask
        return id(tensor)
    return at if tensor.numel() else None
