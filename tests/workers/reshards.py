"""Random reshards: torchrun reshards.py <directory> <seconds> <first batch> <batches>.

A batch is some tensors that some ranks save and others load, each held at random, and at random in another way: as
DTensors on partial and permuted meshes of one to three axes (strided ones among them), cut by hand, plain on all ranks
or on some, per rank, tied. What is in a batch follows from its number alone.

The oracle shares no code with ckptlib: a tensor is bytes made of its number, and torch's `distribute_tensor` of its
indexes says which of them each rank has. examples/read_with_numpy.py reads each batch, too.

Writes to <directory>/rank<n>.json what it did, and what was wrong.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from helpers.registry import close_sessions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import ckptlib
from ckptlib.format import sharding

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import read_with_numpy

Shape = tuple[int, ...]
Mesh = tuple[Shape, Shape]
"""Shape and ranks."""

WORLDS: list[Shape] = [(0,), (3,), (0, 1), (1, 4), (0, 2, 4), (0, 1, 2, 3), (1, 2, 3, 4), (0, 1, 2, 3, 4)]
GROUPS: dict[Shape, dist.ProcessGroup | None] = {}
TENSORS = 24

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
]
SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 17]
LARGE: list[Shape] = [(300, 1100), (1100, 301), (7, 90, 700), (700_001,)]
"""Of several chunks."""
MESH_SHAPES: list[Shape] = [
    *((1,), (2,), (3,), (4,), (5,), (2, 2), (1, 3), (2, 1), (1, 4), (5, 1)),
    *((1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 1), (3, 1, 1)),
]


@dataclass
class Held:
    """How a tensor is held, by the ranks that have its name."""

    how: str
    ranks: Shape
    meshes: list[Mesh] = field(default_factory=list)
    """Of a DTensor. Several: one like it on each of them."""
    placements: tuple[Placement, ...] = ()
    boxes: dict[int, tuple[Shape, Shape]] = field(default_factory=dict)
    """By rank: offset and shape of what was cut by hand."""

    def mesh(self, rank: int) -> DeviceMesh:
        shape, ranks = next((m for m in self.meshes if rank in m[1]), self.meshes[0])
        return DeviceMesh("cpu", torch.tensor(ranks).view(shape), _init_backend=False)


@dataclass
class Tensor:
    name: str
    number: int
    dtype: torch.dtype
    shape: Shape
    held: Held
    tied: str
    """Another name that the tensor has; "": none."""

    def elements(self, rank: int) -> np.ndarray:
        """The bytes of each, in a row. `rank`: of the saved ones, where each has its own."""
        seed = [self.number, rank if self.held.how == "per-rank" else 0]
        rows = np.random.default_rng(seed).integers(0, 256, (math.prod(self.shape), self.dtype.itemsize), np.uint8)
        return rows % 2 if self.dtype == torch.bool else rows


# Drawn at random


def draw_batch(draw: random.Random, number: int, world: Shape) -> list[Tensor]:
    found = []
    for i in range(TENSORS):
        shape = (
            draw.choice(LARGE)
            if draw.random() < 0.04
            else tuple(draw.choices(SIZES, k=draw.choice([0, 1, 2, 2, 3, 4])))
        )
        held = draw_held(draw, shape, world, saved=True)
        ties = held.how != "per-rank" and draw.random() < 0.2
        tensor = Tensor(f"t{i}", number * TENSORS + i, draw.choice(DTYPES), shape, held, f"t{i}-tied" if ties else "")
        found.append(tensor)
    return found


def draw_held(draw: random.Random, shape: Shape, world: Shape, saved: bool) -> Held:
    how = draw.choice(["dtensor"] * 6 + ["plain", "plain", "by-hand", "by-hand", "per-rank"])
    if how == "dtensor":
        mesh_shape = draw.choice([s for s in MESH_SHAPES if math.prod(s) <= len(world)])
        if draw.random() < 0.5:  # most of the ranks
            most = max(math.prod(s) for s in MESH_SHAPES if math.prod(s) <= len(world))
            mesh_shape = draw.choice([s for s in MESH_SHAPES if math.prod(s) == most])
        size = math.prod(mesh_shape)
        order = draw.sample(world, len(world))
        several = draw.randint(1, len(world) // size) if draw.random() < 0.3 else 1
        meshes = [(mesh_shape, tuple(order[i * size : (i + 1) * size])) for i in range(several)]
        placements = draw_placements(draw, shape, mesh_shape)
        # a name that stands for one tensor on two meshes cannot be on ranks without one
        ranks = world if several == 1 else tuple(rank for _, ranks in meshes for rank in ranks)
        return Held(how, ranks, meshes, placements)
    if how == "by-hand" and shape:
        boxes = draw_cuts(draw, shape, len(world)) if saved else [draw_box(draw, shape) for _ in world]
        return Held(how, world, boxes=dict(zip(world, boxes, strict=True)))
    if how == "per-rank" and saved:
        return Held(how, world)
    return Held("plain", world if draw.random() < 0.7 else tuple(draw.sample(world, draw.randint(1, len(world)))))


def draw_placements(draw: random.Random, shape: Shape, mesh: Shape) -> tuple[Placement, ...]:
    """Those of which torch itself has one reading: tests/format/test_sharding.py shows it."""
    while True:
        found: list[Placement] = []
        words = []
        for axis in range(len(mesh)):
            kind, dim = draw.choice("RSST") if shape else "R", draw.randrange(max(len(shape), 1))
            factor = draw.choice([math.prod(mesh[axis + 1 :]), *mesh[axis + 1 :], draw.randint(1, 4)])
            found.append({"R": Replicate(), "S": Shard(dim), "T": _StridedShard(dim, split_factor=factor)}[kind])
            words.append({"R": "R", "S": f"S{dim}", "T": f"SS{dim}x{factor}"}[kind])
        try:
            sharding.shape_local(shape, mesh, [sharding.decode(word) for word in words], (0,) * len(mesh))
        except ckptlib.UnsupportedState:
            continue
        return tuple(found)


def draw_cuts(draw: random.Random, shape: Shape, number: int) -> list[tuple[Shape, Shape]]:
    """So many boxes that together are the whole, each cut from the one that was there; some may be empty."""
    boxes = [((0,) * len(shape), shape)]
    while len(boxes) < number:
        offset, size = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(shape))
        at = draw.randint(0, size[dim])
        far = tuple(o + at if d == dim else o for d, o in enumerate(offset))
        boxes.append((offset, tuple(at if d == dim else n for d, n in enumerate(size))))
        boxes.append((far, tuple(n - at if d == dim else n for d, n in enumerate(size))))
    return draw.sample(boxes, number)


def draw_box(draw: random.Random, shape: Shape) -> tuple[Shape, Shape]:
    offset = tuple(draw.randint(0, n) for n in shape)
    return offset, tuple(draw.randint(0, n - o) for n, o in zip(shape, offset, strict=True))


# As a rank holds it


def indexes(shape: Shape, held: Held, rank: int) -> np.ndarray:
    """Which elements of the whole a rank has, in the shape of its local tensor."""
    whole = torch.arange(math.prod(shape)).view(shape)
    if held.how == "dtensor":
        mesh = held.mesh(rank)
        if mesh.get_coordinate() is None:
            return np.zeros(0, np.int64)
        return distribute_tensor(whole, mesh, held.placements, src_data_rank=None).to_local().numpy()
    if held.how == "by-hand":
        offset, size = held.boxes[rank]
        return whole.numpy()[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
    return whole.numpy()


@dataclass
class Local:
    """A tensor as a rank holds it, with every byte within reach, whatever its dtype."""

    raw: torch.Tensor
    """Its elements' bytes, in the last dim."""
    tensor: torch.Tensor
    given: object
    """What ckptlib is given."""


def local(draw: random.Random, dtype: torch.dtype, shape: Shape, held: Held, rank: int, content: np.ndarray) -> Local:
    """`content`: by element of the local tensor, its bytes. Now and then it lies in memory in another order."""
    dims = range(content.ndim - 1)
    order = draw.sample(dims, len(dims)) if draw.random() < 0.3 else dims
    back = np.argsort(order).tolist()
    stored = torch.empty([*(content.shape[dim] for dim in order), dtype.itemsize], dtype=torch.uint8)
    stored.numpy()[...] = content.transpose(*order, content.ndim - 1)
    tensor = stored.view(dtype).squeeze(-1).permute(back)
    raw = stored.permute(*back, content.ndim - 1)
    if held.how == "by-hand":
        return Local(raw, tensor, ckptlib.Sharded(tensor, held.boxes[rank][0], shape))
    if held.how == "per-rank":
        return Local(raw, tensor, ckptlib.PerRank(tensor))
    if held.how == "plain":
        return Local(raw, tensor, tensor)
    stride = torch.empty(shape, device="meta").stride()
    made = DTensor.from_local(tensor, held.mesh(rank), held.placements, run_check=False, shape=shape, stride=stride)
    return Local(raw, tensor, made)


def cut_of(tensor: Tensor, held: Held, rank: int, saved_rank: int) -> np.ndarray:
    """The bytes of each element that a rank has of a tensor."""
    return tensor.elements(saved_rank)[indexes(tensor.shape, held, rank)]


# A batch


def save(directory: Path, world: Shape, step: int, batch: list[Tensor], draw: random.Random) -> None:
    rank, state = dist.get_rank(), {}
    for tensor in batch:
        if rank in tensor.held.ranks:
            content = cut_of(tensor, tensor.held, rank, world.index(rank))
            state[tensor.name] = local(draw, tensor.dtype, tensor.shape, tensor.held, rank, content).given
            if tensor.tied:
                state[tensor.tied] = state[tensor.name]
    own = world.index(rank)
    state["own"] = ckptlib.PerRank({"rank": (own, 2**60), "tensor": torch.full((own, 3), own)})  # of a shape of its own
    ckptlib.save(root_of(directory, world), state, step, process_group=GROUPS[world])


def load(
    directory: Path, world: Shape, step: int, batch: list[Tensor], into: Shape, draw: random.Random
) -> Iterator[str]:
    """What is wrong after a load, a line each. What all ranks draw, they draw alike."""
    rank, state, wanted = dist.get_rank(), {}, []
    some = draw.random() < 0.3
    own = random.Random(f"{draw.random()} {rank}")
    for tensor in batch:
        for name in filter(None, (tensor.name, tensor.tied)):
            held = draw_held(draw, tensor.shape, into, saved=False)
            if tensor.held.how == "per-rank":
                held = Held("per-rank", into)
            if (some and draw.random() < 0.3) or rank not in held.ranks:
                continue
            at = into.index(rank)
            expected = cut_of(tensor, held, rank, at if at < len(world) else 0)
            made = local(own, tensor.dtype, tensor.shape, held, rank, np.where(expected == 1, 0, 1).astype(np.uint8))
            state[name] = made.given
            wanted.append((name, tensor, held, made, expected))
    at = into.index(rank) if into.index(rank) < len(world) else 0
    mine = torch.full((at, 3), -1)
    state["own"] = ckptlib.PerRank({"rank": (0, 0), "tensor": mine})
    try:
        ckptlib.load(root_of(directory, world), state, step, process_group=GROUPS[into], strict=False)
    except ckptlib.CkptError as error:
        yield f"{type(error).__name__}: {error}"
        return
    if (state["own"].value["rank"], mine.tolist()) != ((at, 2**60), [[at] * 3] * at):
        yield f"own differs: {state['own']}"
    for name, tensor, held, made, expected in wanted:
        if not np.array_equal(made.raw.numpy(), expected):
            yield f"{name} differs: {tensor} into {held}"


def read_by_others(directory: Path, world: Shape, step: int, batch: list[Tensor]) -> Iterator[str]:
    """What is wrong by the reader of examples/, which was written from FORMAT.md alone."""
    root, rank = root_of(directory, world), step % len(world)
    found = read_with_numpy.read(root, read_with_numpy.find(root, str(step)), rank)
    if found.values != {"own/rank": (rank, 2**60)}:
        yield f"values differ: {found.values}"
    if found.tensors.pop("own/tensor").tolist() != [[rank] * 3] * rank:
        yield "own/tensor differs"
    names = {name: tensor for tensor in batch for name in (tensor.name, tensor.tied) if name}
    if {name for name in found.tensors if not name.startswith("@rng/")} != names.keys():
        yield f"other names: {names.keys() ^ found.tensors.keys()}"
    for name, tensor in names.items():
        got = found.tensors.get(name)
        if got is None or (f"torch.{found.dtypes[name]}", got.shape) != (str(tensor.dtype), tensor.shape):
            yield f"{name} is not {tensor}"
        elif got.tobytes() != tensor.elements(rank).tobytes():
            yield f"{name} differs: {tensor}"


def root_of(directory: Path, world: Shape) -> Path:
    return directory / "-".join(map(str, world))


def run_batch(directory: Path, number: int) -> list[str]:
    """What was wrong, on this rank."""
    draw = random.Random(f"batch {number}")
    rank, world, step, wrong = dist.get_rank(), draw.choice(WORLDS), number + 1, []
    batch = draw_batch(draw, number, world)
    targets = [draw.choice(WORLDS) for _ in range(2)]
    if rank in world:
        try:
            save(directory, world, step, batch, random.Random(f"{number} {rank}"))
        except ckptlib.CkptError as error:
            wrong.append(f"save by {world}: {type(error).__name__}: {error}")
    if agreed_max(len(wrong)):
        return wrong
    for n, into in enumerate(targets):
        if rank in into:
            found = load(directory, world, step, batch, into, random.Random(f"{number} {n}"))
            wrong += [f"{world} to {into}: {line}" for line in found]
        dist.barrier()
    if rank == 0:
        wrong += [f"{world} without ckptlib: {line}" for line in read_by_others(directory, world, step, batch)]
        for kind in ("packs", "parts"):
            shutil.rmtree(next((root_of(directory, world) / kind).glob(f"{step:012d}-*")))
    return wrong


def agreed_max(value: int) -> int:
    most = torch.tensor(value)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def main() -> None:
    directory, seconds, first, most = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    faulthandler.dump_traceback_later(seconds + 120, exit=True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    for world in WORLDS:
        GROUPS[world] = dist.new_group(list(world))
    began, wrong, number = time.monotonic(), [], first
    while number < first + most and not agreed_max(int(time.monotonic() - began > seconds)):
        try:
            found = run_batch(directory, number)
        except Exception as error:
            raise RuntimeError(f"batch {number}") from error
        wrong += [f"batch {number}, rank {dist.get_rank()}: {line}" for line in found]
        number += 1
    report = {"batches": number - first, "wrong": wrong}
    (directory / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.barrier()
    close_sessions()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
