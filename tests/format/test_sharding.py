"""sharding against torch's own DTensor, element by element.

Oracles: distribute_tensor on a fake process group, as each rank in turn (no communication, no processes), and real
FSDP2 over tensor parallelism on four gloo ranks. What ckptlib refuses must be what torch reads in two ways.
"""

from __future__ import annotations

import datetime
import itertools
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.meshes import Shape, coordinates, placements_of
from helpers.old_torch import tells_order
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckptlib.errors import UnsupportedState
from ckptlib.format.box import Box
from ckptlib.format.sharding import (
    Piece,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    coordinates_touching,
    encode,
    least_pieces,
    pieces,
    replica_axes,
    shape_local,
)


def to_torch(placement: Placement) -> TorchPlacement:
    if isinstance(placement, Replicate):
        return TorchReplicate()
    if isinstance(placement, Shard):
        return TorchShard(placement.dim)
    return _StridedShard(placement.dim, split_factor=placement.split_factor)


def from_torch(placement: TorchPlacement) -> Placement:
    if isinstance(placement, _StridedShard):
        return StridedShard(placement.dim, placement.split_factor)
    if isinstance(placement, TorchShard):
        return Shard(placement.dim)
    assert isinstance(placement, TorchReplicate)
    return Replicate()


def assemble(held: Sequence[Piece], shape: Shape, full: np.ndarray) -> np.ndarray:
    """The local tensor that `held` describes; -1 where nothing was put."""
    local = np.full(shape, -1, dtype=full.dtype)
    for piece in held:
        assert piece.box.shape == piece.local.shape
        assert piece.box.numel > 0
        local[piece.local.slices()] = full[piece.box.slices()]
    assert list(held) == sorted(held, key=lambda piece: piece.local.offset)
    return local


# Against distribute_tensor


SHAPES: list[Shape] = [(), (0,), (1,), (5,), (7,), (8,), (9,), (17,), (4, 0), (1, 6), (7, 3), (8, 4), (3, 2, 5)]
MESHES: list[Shape] = [(1,), (2,), (3,), (2, 2), (3, 2), (2, 3), (4, 2), (1, 2), (2, 2, 2), (2, 1, 3)]


def as_each_rank(mesh_shape: Shape) -> Iterator[DeviceMesh]:
    """The mesh as each rank sees it, in turn."""
    world = math.prod(mesh_shape)
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            yield init_device_mesh("cpu", mesh_shape)
        finally:
            dist.destroy_process_group()


@cache
def two_readings(size: int, mesh: DeviceMesh, placements: tuple[TorchPlacement, ...], coordinate: Shape) -> bool:
    """Whether cutting as fully_shard does gives `coordinate` other elements of a 1-d tensor than distribute_tensor.

    Also where several axes cut it and torch finds no order of them: full_tensor goes wrong there (seen on gloo).
    """
    cutting = tuple(TorchReplicate() if mesh.size(axis) == 1 else p for axis, p in enumerate(placements))
    order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(cutting, mesh)
    if order is None:
        return sum(not p.is_replicate() for p in cutting) > 1
    held = torch.arange(size)
    for axis in order[0].mesh_dims if order else ():
        chunks = torch.chunk(held, mesh.size(axis))
        own = coordinate[axis]
        held = chunks[own] if own < len(chunks) else held[:0]
    return not torch.equal(held, distribute_tensor(torch.arange(size), mesh, placements, src_data_rank=None).to_local())


def on_dim(placements: Sequence[Placement], dim: int) -> tuple[TorchPlacement, ...]:
    """What the placements do to one dim, as if it were a 1-d tensor."""
    only = (Replicate() if isinstance(p, Replicate) or p.dim != dim else replace(p, dim=0) for p in placements)
    return tuple(map(to_torch, only))


@tells_order
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_pieces_are_what_distribute_tensor_gives(mesh_shape: Shape) -> None:
    shapes = [s for s in SHAPES if len(s) < 3 or len(mesh_shape) < 3]
    refused: set[tuple[Shape, tuple[Placement, ...]]] = set()
    ambiguous: set[tuple[Shape, tuple[Placement, ...]]] = set()
    for mesh in as_each_rank(mesh_shape):
        coordinate = tuple(mesh.get_coordinate() or ())
        for shape in shapes:
            full = torch.arange(math.prod(shape)).reshape(shape)
            for placements in placements_of(len(shape), mesh_shape):
                theirs = [to_torch(p) for p in placements]
                given_out = distribute_tensor(full, mesh, theirs, src_data_rank=None).to_local()
                if any(two_readings(n, mesh, on_dim(placements, dim), coordinate) for dim, n in enumerate(shape)):
                    ambiguous.add((shape, placements))
                try:
                    held = pieces(shape, mesh_shape, placements, coordinate)
                except UnsupportedState:
                    refused.add((shape, placements))
                    continue
                local = shape_local(shape, mesh_shape, placements, coordinate)
                assert local == tuple(given_out.shape), (shape, placements, coordinate)
                assert np.array_equal(assemble(held, local, full.numpy()), given_out.numpy()), (shape, placements)
    assert refused == ambiguous
    assert bool(refused) == (mesh_shape not in {(1,), (2,), (3,), (1, 2), (2, 1, 3)})


# Against FSDP2 over tensor parallelism


def model_of(rows: int) -> nn.Module:
    """Uneven in every dim that is sharded, but for those where FSDP2 itself refuses."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, rows), nn.Linear(rows, 6), nn.Linear(3, 1), nn.Embedding(rows, 3))


def check_on_rank(rank: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=4, timeout=timeout)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    kinds: set[str] = set()
    for rows in (6, 7):
        model = model_of(rows)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel(), "3": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        for (name, parameter), original in zip(model.named_parameters(), model_of(rows).parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            full = original.detach().numpy()  # full_tensor() of torch 2.9 gives something else of uneven pieces
            coordinate = parameter.device_mesh.get_coordinate()
            assert coordinate is not None
            placements = [from_torch(p) for p in parameter.placements]
            layout = (tuple(parameter.shape), tuple(parameter.device_mesh.shape), placements, coordinate)
            local = parameter.to_local().detach().numpy()
            assert shape_local(*layout) == local.shape, name
            assert np.array_equal(assemble(pieces(*layout), local.shape, full), local), name
            kinds.add(" ".join(map(encode, placements)))
    assert {"SS0x2 S0", "S0 S1", "S0"} <= kinds, kinds
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


def test_pieces_are_what_fsdp2_and_tensor_parallel_give(tmp_path: Path) -> None:
    multiprocessing.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel"])
    try:
        torch.multiprocessing.start_processes(
            check_on_rank, args=(str(tmp_path / "rendezvous"),), nprocs=4, start_method="forkserver"
        )
    except torch.multiprocessing.ProcessRaisedException as error:
        if "FSDP+TP sharding does not support uneven sharding" not in str(error):
            raise
        pytest.skip("FSDP2 of this torch (2.6) refuses what is uneven under tensor parallelism")


# Properties


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Shape, Shape, tuple[Placement, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=3)))
    mesh_shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    kinds: st.SearchStrategy[Placement] = st.just(Replicate())
    if shape:
        dims = st.integers(0, len(shape) - 1)
        kinds = st.one_of(kinds, st.builds(Shard, dims), st.builds(StridedShard, dims, st.integers(1, 5)))
    placements = tuple(draw(kinds) for _ in mesh_shape)
    try:
        shape_local(shape, mesh_shape, placements, (0,) * len(mesh_shape))
    except UnsupportedState:
        assume(False)
    return shape, mesh_shape, placements


def first_replicas(mesh_shape: Shape, placements: tuple[Placement, ...]) -> list[Shape]:
    fixed = replica_axes(placements)
    return [c for c in coordinates(mesh_shape) if all(c[axis] == 0 for axis in fixed)]


@settings(deadline=None)
@given(layouts())
def test_pieces_are_disjoint_and_cover(layout: tuple[Shape, Shape, tuple[Placement, ...]]) -> None:
    shape, mesh_shape, placements = layout
    counts = np.zeros(shape, dtype=int)
    for coordinate in first_replicas(mesh_shape, placements):
        held = pieces(shape, mesh_shape, placements, coordinate)
        local = np.zeros(shape_local(shape, mesh_shape, placements, coordinate), dtype=int)
        for piece in held:
            counts[piece.box.slices()] += 1
            local[piece.local.slices()] += 1
        assert (local == 1).all()
        assert bool(held) == bool(local.size)
    assert (counts == 1).all()


@settings(deadline=None)
@given(layouts(), st.data())
def test_replicas_hold_the_same(layout: tuple[Shape, Shape, tuple[Placement, ...]], data: st.DataObject) -> None:
    shape, mesh_shape, placements = layout
    coordinate = tuple(data.draw(st.integers(0, n - 1)) for n in mesh_shape)
    fixed = replica_axes(placements)
    first = tuple(0 if axis in fixed else i for axis, i in enumerate(coordinate))
    assert pieces(shape, mesh_shape, placements, coordinate) == pieces(shape, mesh_shape, placements, first)


@settings(deadline=None)
@given(layouts(), st.data())
def test_coordinates_touching_is_brute_force(
    layout: tuple[Shape, Shape, tuple[Placement, ...]], data: st.DataObject
) -> None:
    shape, mesh_shape, placements = layout
    offset = [data.draw(st.integers(0, n)) for n in shape]
    box = Box(tuple(offset), tuple(data.draw(st.integers(0, n - a)) for n, a in zip(shape, offset, strict=True)))
    expected = [
        coordinate
        for coordinate in first_replicas(mesh_shape, placements)
        if any(piece.box.intersect(box) for piece in pieces(shape, mesh_shape, placements, coordinate))
    ]
    assert coordinates_touching(shape, mesh_shape, placements, box) == expected


@given(layouts())
def test_least_pieces_is_a_bound_that_is_nearly_met(layout: tuple[Shape, Shape, tuple[Placement, ...]]) -> None:
    shape, mesh_shape, placements = layout
    found = {piece.box for at in coordinates(mesh_shape) for piece in pieces(shape, mesh_shape, placements, at)}
    least = least_pieces(shape, mesh_shape, placements)
    assert least <= len(found) <= 2 ** (len(mesh_shape) + len(shape)) * least


def test_least_pieces_never_walks_the_mesh() -> None:
    assert least_pieces((2**59,), (2**50,), (Shard(0),)) == 2**50
    assert least_pieces((2**30, 2**30), (2**20, 2**20), (StridedShard(0, 2**10), Shard(1))) == 2**50
    assert least_pieces((2**59,), (2**9, 2**40), (StridedShard(0, 2**40), Shard(0))) == 2**49


def test_coordinates_touching_never_walks_the_mesh() -> None:
    """A billion holders, of whom some hold a box."""
    mesh_shape, placements = (2**10, 2, 2**10, 2**10), (Shard(0), Replicate(), StridedShard(1, 2**10), Shard(1))
    shape = (2**20, 2**20)
    for coordinate in ((3, 0, 5, 7), (2**10 - 1, 0, 0, 2**10 - 1)):
        (piece,) = pieces(shape, mesh_shape, placements, coordinate)
        assert coordinates_touching(shape, mesh_shape, placements, piece.box) == [coordinate]
    assert coordinates_touching((2**60,), (2**18,), (StridedShard(0, 1),), Box((2**60 - 1,), (1,))) == [(2**18 - 1,)]


@pytest.mark.parametrize("nums", [(2, 3), (3, 2), (4, 2), (3, 3), (2, 5), (2, 2, 3), (3, 2, 2)])
def test_strided_sizes_are_told_apart_as_if_every_element_were_dealt(nums: tuple[int, ...]) -> None:
    """What is accepted without a look at every holder is what such a look accepts: numpy deals in both ways."""
    placements = [StridedShard(0, math.prod(nums[1:])), *(Shard(0) for _ in nums[1:])]
    factors = [math.prod(nums[1:]), *[1] * (len(nums) - 1)]
    for size in range(1, 3 * math.prod(nums) + 8):
        alike = True
        for index in itertools.product(*map(range, nums)):
            dealt = np.arange(size)
            for num, factor, i in zip(nums, factors, index, strict=True):
                dealt = np.concatenate([chunks(part, num)[i] for part in chunks(dealt, factor)])
            nested = np.arange(size)
            for axis in (*range(1, len(nums)), 0):
                nested = chunks(nested, nums[axis])[index[axis]]
            alike = alike and np.array_equal(dealt, nested)
        try:
            shape_local((size,), nums, placements, (0,) * len(nums))
        except UnsupportedState:
            assert not alike, size
        else:
            assert alike, size


def chunks(array: np.ndarray, num: int) -> list[np.ndarray]:
    """As torch.chunk cuts, with empty ones at the end."""
    each = max(-(-len(array) // num), 1)
    return [array[i * each : (i + 1) * each] for i in range(num)]


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [((2,), (StridedShard(0, 999_999_999),)), ((64, 64, 64), (StridedShard(0, 4096), StridedShard(0, 64), Shard(0)))],
)
def test_what_is_cut_too_finely_is_refused_at_once(
    mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    for refuse in (pieces, coordinates_touching):
        argument = (0,) * len(mesh_shape) if refuse is pieces else Box((5,), (2**50,))
        with pytest.raises(UnsupportedState, match="more than 262,144 pieces"):
            refuse((2**59 + 1,), mesh_shape, placements, argument)  # type: ignore[operator]
