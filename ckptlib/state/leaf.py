"""Leaves: one tensor of the state, as this rank holds it, and how it may be held.

Of the code for state and loading, only this file, `places`, `subclasses`, `made_tensors`, `optimizer_tensors`, `beside`
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
    """The shape of the whole tensor."""


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
    """This rank's boxes in global coordinates, each with a view of the same shape."""
    owner: torch.optim.Optimizer | None
    """The optimizer whose step is the only writer of this tensor; None if none is known."""
    tied: str | None = None
    """The first name of this tensor on this rank, if this is a further one; other ranks may not tie them."""
    frozen: bool = False
    """Whether it is a parameter that asks for no gradient."""
    outer: torch.Tensor | None = None
    """The DTensor around it, if any: torch counts writes to that apart."""
    lent: bool = False
    """Whether it may have been made for this pass alone: nothing keeps it beyond the snapshot. In host memory, only
    tensors that a module's hooks made count as lent: a device's memory is scarce."""


def local_of(tensor: torch.Tensor | Sharded) -> torch.Tensor:
    """Returns the tensor that an optimizer would know."""
    return tensor.tensor if isinstance(tensor, Sharded) else tensor


def storage_of(tensor: torch.Tensor) -> int | None:
    """Returns the address of the memory of this rank's part; None for a kind of tensor that may have none."""
    local = own_part(tensor)
    return local.untyped_storage().data_ptr() if type(local) in PLAIN else None


def leaf_of(
    tensor: torch.Tensor | Sharded, name: str, per_rank: bool, owner: torch.optim.Optimizer | None
) -> Leaf | None:
    """Returns the tensor as this rank holds it, or None if this rank is outside of the tensor's mesh."""
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
    """Returns the local tensor, its box, and the shape of the whole."""
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
    """Returns Python integers, which documents need; numpy's and torch's are converted."""
    try:
        if not any(isinstance(number, bool) for number in given):
            return tuple(map(index, given))
    except TypeError:  # it holds others, or is no sequence
        pass
    raise UnsupportedState(f"{name}: Sharded has {what} {given!r}; give a tuple of integers, one for each dim")


def leaf_of_plain(
    tensor: torch.Tensor, name: str, per_rank: bool, owner: torch.optim.Optimizer | None, tied: str | None = None
) -> Leaf:
    """Returns the leaf of an ordinary tensor that was not refused."""
    shape = tuple(tensor.shape)
    pieces = () if 0 in shape else ((_whole(shape), tensor),)
    held = _OWN if per_rank else _REPLICA
    return Leaf(name, _name_of(tensor.dtype), shape, held, pieces, owner, tied, _is_frozen(tensor))


@lru_cache(maxsize=1024)
def _whole(shape: tuple[int, ...]) -> Box:
    """Returns one object for all tensors of a shape: there may be thousands of small ones."""
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
    return Leaf(name, dtype_name(tensor), shape, held, pieces, owner, frozen=_is_frozen(tensor), outer=tensor)


@lru_cache(maxsize=1024)  # layers are alike
def _pieces_of(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[sharding.Placement, ...],
    coordinate: tuple[int, ...],
) -> tuple[tuple[sharding.Piece, ...], tuple[int, ...]]:
    """Returns what a coordinate holds, and the shape of its local tensor."""
    asked = shape, mesh_shape, placements, coordinate
    return sharding.pieces(*asked), sharding.shape_local(*asked)


def _is_frozen(tensor: torch.Tensor) -> bool:
    # by type first: to ask whether something is a parameter costs a frame of Python
    return type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def is_elsewhere(tensor: torch.Tensor | Sharded) -> bool:
    """Returns whether this is a DTensor, and this rank is outside of its mesh."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None


def is_sharded(tensor: torch.Tensor) -> bool:
    """Returns whether this is a DTensor of which a rank has only a part."""
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


def home_of(meta: torch.Tensor) -> torch.device:
    """Returns the device on which a tensor without memory belongs."""
    if isinstance(meta, DTensor):
        return torch.device(meta.device_mesh.device_type)
    chosen = torch.get_default_device()  # the host, too, if nobody chose any
    return chosen if chosen.type != "cpu" else accelerator.available() or chosen


_meshes: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()
"""Meshes that were computed before: torch 2.13 computes the ranks of a mesh at each call, which took 40 us of the 130
in which a load found the target of a DTensor."""


def mesh_of(tensor: DTensor) -> Mesh:
    """Returns the tensor's mesh, by global ranks."""
    found = _meshes.get(tensor.device_mesh)
    if found is None:
        ranks = tensor.device_mesh.mesh
        found = _meshes[tensor.device_mesh] = Mesh(tuple(ranks.shape), tuple(ranks.flatten().tolist()))
    return found


def placements_of(tensor: DTensor, name: str) -> tuple[sharding.Placement, ...]:
    """Returns a DTensor's placements as ckptlib's. Raises UnsupportedState for Partial and for unknown ones."""
    return tuple(placement_of(p, tensor.ndim, name) for p in tensor.placements)


def placement_of(placement: Any, ndim: int, name: str) -> sharding.Placement:
    """Returns one placement, for one axis of the mesh and a tensor of `ndim` dimensions. Raises as `placements_of`
    does."""
    if isinstance(placement, torch_placements.Replicate):
        return sharding.Replicate()
    if isinstance(placement, torch_placements._StridedShard):
        return sharding.StridedShard(placement.dim % ndim, int(placement.split_factor))
    if isinstance(placement, torch_placements.Shard):
        return sharding.Shard(placement.dim % ndim)
    raise UnsupportedState(f"{name}: placement {placement!r} cannot be saved; redistribute to Replicate() or Shard()")


PLAIN = (torch.Tensor, nn.Parameter)
"""The types of nearly all tensors: these need no further questions about their kind."""


def refuse_tensor(tensor: torch.Tensor | Sharded, name: str) -> None:
    """Raises UnsupportedState for a kind of tensor whose shape or address cannot even be asked for."""
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
            f"{_instead(tensor)}"
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


def _instead(tensor: torch.Tensor) -> str:
    """Returns advice for torchrec's tensors, and for a weight of a frozen base, such as bitsandbytes' Int8Params."""
    if type(tensor).__name__ == "ShardedTensor":
        return ". Or save it by ckptlib.dcp.save, which takes one where each rank has one shard at most"
    if not isinstance(tensor, nn.Parameter) or tensor.requires_grad:
        return ""
    return (
        ". Or, since it is frozen, save what is trained alone: {name: p for name, p in model.named_parameters() if "
        "p.requires_grad}"
    )


def refuse_freed(tensor: torch.Tensor, name: str) -> None:
    """Raises UnsupportedState for an ordinary tensor that has a shape but no memory left: to read it would end the
    process."""
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        raise UnsupportedState(
            f"{name}: its memory was freed, as FSDP2 frees that of a whole parameter once it is sharded again; give "
            "the module, or take parameters from it while they are sharded: module.reshard()"
        )


@lru_cache(maxsize=64)
def _is_known(dtype: torch.dtype) -> bool:
    return dtypes.known(_name_of(dtype))


def _is_buffer(tensor: torch.Tensor) -> bool:
    """Returns whether this is what nn.Buffer, a factory, makes: a torch.Tensor with a mark; a functional wrapper is
    not."""
    return type(tensor) is getattr(nn, "Buffer", None)


def is_lazy(tensor: torch.Tensor) -> bool:
    """Returns whether this is a parameter or buffer of a lazy module that has not seen its first input."""
    return type(tensor) not in PLAIN and isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))


@lru_cache(maxsize=64)
def torch_dtype(name: str) -> torch.dtype:
    """Returns a dtype by name. Raises StateMismatch for one that this torch does not have."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise StateMismatch(f"the checkpoint has dtype {name}; torch {torch.__version__} lacks it; use a newer one")
    return found


@lru_cache(maxsize=256)
def is_converted(saved: torch.dtype, wanted: torch.dtype) -> bool:
    """Returns whether a load may convert one dtype to the other: torch can, and no imaginary part is dropped."""
    if saved == wanted or (saved.is_complex and not wanted.is_complex):
        return saved == wanted
    try:
        torch.empty(1, dtype=wanted, device="cpu").copy_(torch.empty(1, dtype=saved, device="cpu"))
    except NotImplementedError:  # for float4, say
        return False
    return True


def dtype_name(tensor: torch.Tensor) -> str:
    """Returns torch's name of the dtype without the module: "bfloat16"."""
    return _name_of(tensor.dtype)


@lru_cache(maxsize=64)
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def identity(tensor: torch.Tensor | Sharded) -> object:
    """Returns what two names of one tensor have in common; None if nothing tells.

    A parameter is known by itself, since an empty shard has no memory to be known by.
    """
    if isinstance(tensor, Sharded):
        return (id(tensor.tensor), tuple(tensor.offset), tuple(tensor.shape))
    if isinstance(tensor, (nn.Parameter, DTensor)):
        return id(tensor)
    return identity_of_plain(tensor, place_of_plain(tensor))


def identity_of_plain(tensor: torch.Tensor, at: tuple[object, ...]) -> object:
    """Returns the `identity` of a tensor of one of the types in `PLAIN`, at its place."""
    if type(tensor) is not torch.Tensor and isinstance(tensor, nn.Parameter):  # the former is quicker to ask
        return id(tensor)
    return at if tensor.numel() else None
