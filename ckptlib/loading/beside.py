"""Divides saved state that belongs to a parameter of an optimizer, such as a momentum or a factor of it, where the
parameter is divided now.

Knows placements and boxes, but not what an optimizer means by its state: state that was divided as the parameter was is
divided as the parameter is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import placement_types as torch_placements

from ckptlib.format import sharding
from ckptlib.format.layout import ByHand, Placed, TensorEntry
from ckptlib.format.paths import segment_of
from ckptlib.format.sharding import Replicate
from ckptlib.loading.load_plan import LoadPlan, Make, made, room_for
from ckptlib.state.leaf import Sharded, is_elsewhere, mesh_of, placement_of, torch_dtype
from ckptlib.state.places import own_part
from ckptlib.state.subclasses import plain_like


@dataclass(frozen=True, slots=True)
class Beside:
    """A parameter as it was saved and as it is now."""

    plan: LoadPlan
    path: str
    """Path of the parameter's state in this program."""
    param: torch.Tensor
    """The parameter as the optimizer has it here."""
    by_hand: Sharded | None
    """How the parameter is cut by hand here, if it is."""
    then: TensorEntry | None
    """The parameter as it was saved, if it was."""
    dtensors: Collection[str]
    """Paths in its saved state of tensors that were DTensors and whole on each rank: a layout does not distinguish
    these from plain tensors."""

    def make(self, key: str, entry: TensorEntry, now: object, dtype: torch.dtype) -> torch.Tensor | Sharded | None:
        """Returns memory to fill with a saved tensor of the state; None: a plain tensor, whole on each rank.

        `key`: a path below that of the parameter's state. `now`: what the optimizer has there, which does not fit.
        """
        why = self._why_not(key, entry, now)
        if why is not None:
            self.plan.mismatch(f"{self.path}/{key}: {why}")
        with room_for(entry):
            if entry.shape == self._shape and self._was_like_the_parameter(entry):
                return plain_like(self.param, dtype) if self.by_hand is None else _cut(self.by_hand, now, dtype)
            if isinstance(self.param, DTensor) and (key in self.dtensors or _is_sharded(entry)):
                return _placed(self.param, self._dims(entry), entry, dtype)
        return None

    def nested(self, key: str, saved_name: str) -> Make:
        """Returns a function that makes memory within a container of the state. `saved_name`: of the container."""

        def make(path: str, entry: TensorEntry, now: object) -> torch.Tensor | Sharded:
            found = self.make(segment_of(key) + path[len(saved_name) :], entry, now, torch_dtype(entry.dtype))
            return made(entry, own_part(self.param).device) if found is None else found

        return make

    @property
    def _shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter here."""
        return tuple(self.param.shape if self.by_hand is None else self.by_hand.shape)

    def _why_not(self, key: str, entry: TensorEntry, now: object) -> str | None:
        """Returns the message if nothing tells which part of the state belongs here; else None."""
        local = tuple(own_part(self.param).shape)
        if not entry.shape or key in self.dtensors or _is_sharded(entry) or is_elsewhere(self.param):
            return None
        if isinstance(self.param, DTensor) and entry.shape == self._shape != local == _shape_of_plain(now):
            return (
                f"is {list(entry.shape)}, as all of the parameter is, and the optimizer has a plain tensor of "
                f"{list(local)}, as this rank's part of it is, which no other number of ranks could load: let it keep "
                "a DTensor, as torch.zeros_like(param) makes it"
            )
        # a single number, such as a count, that all ranks have alike fits the whole parameter and any part of it
        is_one = prod(entry.shape) == 1
        if not is_one and entry.shape == self._part_then() and entry.shape != local and self.then is not None:
            return (
                f"is {list(entry.shape)}, as each rank's part of the parameter of {list(self.then.shape)} was when it "
                f"was saved, and this rank's is {list(local)} now: was it a piece, nothing tells of what. Load it with "
                "as many ranks as before; or, if it was whole, take a step first, so that the optimizer has one to fill"
            )
        return None

    def _was_like_the_parameter(self, entry: TensorEntry) -> bool:
        """Returns whether state of a parameter's shape was divided as the parameter was. If the parameter was whole,
        returns True: nothing is known to the contrary."""
        if self.then is None or entry.shape != self.then.shape or isinstance(entry.holding, ByHand):
            return True
        if isinstance(self.then.holding, ByHand):
            return False
        return all(dim == own for dim, own in self._dims(entry).items())

    def _dims(self, entry: TensorEntry) -> dict[int, int | None]:
        """Maps each dim of the parameter that was sharded to the dim of the state that was sharded with it, if any."""
        if self.then is None or not isinstance(self.then.holding, Placed) or not isinstance(entry.holding, Placed):
            return {}
        placements, own = self.then.holding.placements, entry.holding.placements
        if not _is_sharded(entry):
            return {p.dim: None for p in placements if not isinstance(p, Replicate)}
        if self.then.holding.mesh != entry.holding.mesh:
            return {}
        dims: dict[int, int | None] = {}
        for its, mine in zip(placements, own, strict=True):
            if not isinstance(its, Replicate):
                dims.setdefault(its.dim, None if isinstance(mine, Replicate) else mine.dim)
        return dims

    def _part_then(self) -> tuple[int, ...] | None:
        """Returns the shape of each rank's part of the saved parameter, or None unless it was sharded evenly."""
        if self.then is None or not _is_sharded(self.then):
            return None
        assert isinstance(self.then.holding, Placed)
        mesh, placements = self.then.holding.mesh.shape, self.then.holding.placements
        corners = [(0,) * len(mesh), tuple(n - 1 for n in mesh)]
        first, last = (sharding.shape_local(self.then.shape, mesh, placements, corner) for corner in corners)
        return first if first == last else None


def _is_sharded(entry: TensorEntry) -> bool:
    """Returns whether it was a DTensor that an axis of its mesh shards, even an axis of one rank."""
    placements = entry.holding.placements if isinstance(entry.holding, Placed) else ()
    return any(not isinstance(placement, Replicate) for placement in placements)


def _shape_of_plain(tensor: object) -> tuple[int, ...] | None:
    return None if isinstance(tensor, DTensor) or not isinstance(tensor, torch.Tensor) else tuple(tensor.shape)


def _cut(param: Sharded, now: object, dtype: torch.dtype) -> Sharded:
    """Returns a piece that is cut as the parameter is: the present one if it fits, else a new one."""
    piece = param.tensor
    if isinstance(now, torch.Tensor) and (now.shape, now.dtype) == (piece.shape, dtype):
        return Sharded(now, param.offset, param.shape)
    return Sharded(torch.empty_like(piece, dtype=dtype, requires_grad=False), param.offset, param.shape)


def _placed(param: DTensor, dims: dict[int, int | None], entry: TensorEntry, dtype: torch.dtype) -> DTensor:
    """Returns a DTensor of a saved tensor's shape, sharded along these dims of it where the parameter is: see `_dims`.

    A dim of the parameter that was not sharded before tells nothing: along it the tensor is whole on each rank.
    """
    placements = [_along(placement, dims, param.ndim) for placement in param.placements]
    coordinate = param.device_mesh.get_coordinate()
    local: tuple[int, ...] = (0,)
    if coordinate is not None:
        told = [placement_of(placement, len(entry.shape), entry.name) for placement in placements]
        local = sharding.shape_local(entry.shape, mesh_of(param).shape, told, coordinate)
    return DTensor.from_local(
        torch.empty(local, dtype=dtype, device=own_part(param).device),
        param.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(entry.shape),
        stride=torch.empty(entry.shape, device="meta").stride(),
    )


def _along(placement: Placement, dims: dict[int, int | None], ndim: int) -> Placement:
    """Returns the tensor's placement on the mesh axis where the parameter, which has `ndim` dims, has this one."""
    if isinstance(placement, (torch_placements.Shard, torch_placements._StridedShard)):
        dim = dims.get(placement.dim % ndim)
        if dim is not None and isinstance(placement, torch_placements._StridedShard):
            return torch_placements._StridedShard(dim, split_factor=placement.split_factor)
        if dim is not None:
            return torch_placements.Shard(dim)
    return torch_placements.Replicate()
