"""Saves a small model in many layouts and loads each into others: torchrun layouts.py <root> <pairs.json> <seconds>.

The oracle shares no code with ckptlib: before a save, each rank puts the whole of everything into a file with
`torch.save` (on meshes of one axis it was compared with `full_tensor()`); whoever loads compares with that file, bit
for bit. Writes what was wrong to <pairs>.rank<n>, as a JSON list.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import ckptlib

STEPS_BEFORE = 3
STEPS_AFTER = 2

Tensors = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.up = nn.Linear(10, 7)
        self.down = nn.Linear(7, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Odd sizes, a tied weight, a block in bfloat16, buffers of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 10)
        self.blocks = nn.ModuleDict({"0": Block(), "1": Block().bfloat16()})
        self.bn = nn.BatchNorm1d(10)
        self.head = nn.Linear(10, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("mask", torch.zeros(3, 5, dtype=torch.bool))


def seeded(like: torch.Tensor, *seed: object) -> torch.Tensor:
    """Values that depend on the seed alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    if like.dtype.is_floating_point:
        return torch.randn(like.shape, generator=generator).to(like.dtype)
    return torch.randint(0, 2, like.shape, generator=generator).to(like.dtype)


@torch.no_grad()
def tiny(*seed: object) -> Tiny:
    model = Tiny()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.copy_(seeded(tensor, name, *seed))
    model.bn.running_mean[0] = torch.nan
    return model


# Layouts


@dataclass
class Cut:
    """A model in some layout, as this rank holds it."""

    module: object
    """What is given to ckptlib."""
    params: dict[str, nn.Parameter]
    """By the name that the bare model gives them."""
    buffers: Tensors
    join: Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
    """The whole of a tensor, given as this rank holds it, from what every rank has."""


def join_dtensor(tensor: torch.Tensor, locals_by_rank: list[torch.Tensor]) -> torch.Tensor:
    """The cut along the first axis of a mesh is undone first: FSDP cuts last, and is outermost.

    Not `full_tensor()`, which hangs for rows that are cut unevenly twice; it is compared with where it does not.
    """
    if not isinstance(tensor, DTensor):
        return tensor.clone()

    def join(ranks: torch.Tensor, axis: int) -> torch.Tensor:
        if axis < 0:
            return locals_by_rank[int(ranks)]
        parts = [join(ranks[..., i], axis - 1) for i in range(ranks.shape[-1])]
        placement = tensor.placements[axis]
        return torch.cat(parts, placement.dim) if isinstance(placement, (Shard, _StridedShard)) else parts[0]

    return join(tensor.device_mesh.mesh, tensor.device_mesh.ndim - 1)


def cut_of(module: nn.Module, bare: nn.Module) -> Cut:
    return Cut(module, dict(bare.named_parameters()), dict(bare.named_buffers()), join_dtensor)


def mesh_of(*shape: int) -> DeviceMesh:
    found = MESHES.get(shape)
    if found is None:
        ranks = torch.arange(torch.Size(shape).numel()).view(shape)
        found = MESHES[shape] = DeviceMesh("cpu", ranks, mesh_dim_names=("outer", "inner")[-len(shape) :])
    return found


MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def one(model: Tiny, size: int) -> Cut:
    return cut_of(model, model)


def ddp(model: Tiny, size: int) -> Cut:
    return cut_of(nn.parallel.DistributedDataParallel(model, process_group=GROUPS[size]), model)


def fsdp(model: Tiny, size: int) -> Cut:
    return shard(model, mesh_of(size))


def hsdp(model: Tiny, size: int) -> Cut:
    return shard(model, mesh_of(2, size // 2))


def shard(model: Tiny, mesh: DeviceMesh) -> Cut:
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return cut_of(model, model)


def split(model: Tiny, mesh: DeviceMesh) -> None:
    for block in model.blocks.values():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tp(model: Tiny, size: int) -> Cut:
    split(model, mesh_of(size))
    return cut_of(model, model)


def fsdp_tp(model: Tiny, size: int) -> Cut:
    """What tensor parallelism leaves alone (norms, embedding) is sharded on the outer axis only."""
    mesh = mesh_of(2, size // 2)
    split(model, mesh["inner"])
    return shard(model, mesh["outer"])


def stages(model: Tiny, size: int) -> Cut:
    """A pipeline: each rank has its own layers, under the names of the whole model; the tied weight is on both."""
    if dist.get_rank() == 0:
        del model.blocks["1"], model.bn, model.head
    else:
        del model.blocks["0"], model.embed
    return cut_of(model, model)


def boxes(model: Tiny, size: int) -> Cut:
    """Cut by hand, unevenly, along the last dim."""
    rank = dist.get_rank()
    state: dict[str, object] = dict(model.named_buffers())
    params = {}
    for name, param in model.named_parameters():
        length = param.shape[-1]
        edges = [0, 1, 1 + length // 3, length]
        offset = (*(0 for _ in param.shape[1:]), edges[rank])
        local = params[name] = nn.Parameter(param.detach()[..., edges[rank] : edges[rank + 1]].contiguous())
        state[name] = ckptlib.Sharded(local, offset, tuple(param.shape))

    state["head.weight"] = state["embed.weight"]

    def join(tensor: torch.Tensor, locals_by_rank: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(locals_by_rank, -1) if tensor.ndim else tensor.clone()

    return Cut(state, params, dict(model.named_buffers()), join)


LAYOUTS: dict[str, tuple[Callable[[Tiny, int], Cut], int]] = {
    "one": (one, 1),
    "ddp-2": (ddp, 2),
    "fsdp-2": (fsdp, 2),
    "tp-2": (tp, 2),
    "stages-2": (stages, 2),
    "ddp-3": (ddp, 3),
    "fsdp-3": (fsdp, 3),
    "boxes-3": (boxes, 3),
    "fsdp-4": (fsdp, 4),
    "hsdp-4": (hsdp, 4),
    "fsdp+tp-4": (fsdp_tp, 4),
    "fsdp-8": (fsdp, 8),
}
"""By world size, so that one generation of the root follows another."""

GROUPS: dict[int, dist.ProcessGroup | None] = {1: None}


# Training


class Job:
    """A model in a layout, with optimizer, scheduler and plain values."""

    def __init__(self, layout: str, *seed: object) -> None:
        self.layout = layout
        build, size = LAYOUTS[layout]
        self.cut = build(tiny(*seed), size)
        params = self.cut.params.values()
        groups = [
            {"params": [p for p in params if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim != 2], "weight_decay": 0.0, "betas": (0.8, 0.95)},
        ]
        self.optim = torch.optim.AdamW(groups, lr=1e-2)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, step_size=2, gamma=0.5)
        self.progress: dict[str, object] = {"epoch": 0, "seen": 0.0}

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.cut.module, "optim": self.optim, "sched": self.sched, "progress": self.progress}

    def train(self, first: int, last: int) -> None:
        """AdamW with gradients made of the parameters, element by element: the same in every layout, bit for bit."""
        for step in range(first, last):
            for param in self.cut.params.values():
                param.grad = param.detach() * (0.25 + step) + 0.125
            self.optim.step()
            self.sched.step()
        self.progress = {"epoch": last, "seen": last / 7}

    def whole(self) -> Tensors:
        """Everything, as the bare model in one process would have it. Collective."""
        mine: Tensors = {}
        for name, param in self.cut.params.items():
            name_of_bare = "embed.weight" if name == "head.weight" else name
            mine[f"model/{name_of_bare}"] = param.detach()
            mine.update({f"optim/{name_of_bare}/{k}": v for k, v in self.optim.state.get(param, {}).items()})
        size = LAYOUTS[self.layout][1]
        locals_ = {name: t.to_local() if isinstance(t, DTensor) else t.clone() for name, t in mine.items()}
        by_rank = [locals_] * size
        if size > 1:
            dist.all_gather_object(by_rank, locals_, group=GROUPS[size])
        found = {name: self.cut.join(t, [by_rank[r].get(name) for r in range(size)]) for name, t in mine.items()}
        return found | {f"model/{name}": tensor.clone() for name, tensor in self.cut.buffers.items()}

    def plain(self) -> dict[str, object]:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optim.param_groups]
        return {"groups": groups, "sched": self.sched.state_dict(), "progress": self.progress}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def differences(found: Tensors, expected: Tensors) -> list[str]:
    return [name for name in found if name not in expected or not same(found[name], expected[name])]


def members(layout: str) -> range:
    return range(LAYOUTS[layout][1])


# The job


def step_of(layout: str) -> int:
    """The step that each layout saves; ascending as they come."""
    return 1 + list(LAYOUTS).index(layout)


def oracle_path(root: Path, layout: str, rank: int) -> Path:
    return root.parent / f"{layout}-rank{rank}.pt"


def oracle_of(root: Path, layout: str) -> tuple[Tensors, dict[str, object]]:
    tensors: Tensors = {}
    for rank in members(layout):
        mine, plain = torch.load(oracle_path(root, layout, rank), weights_only=True)
        tensors.update(mine)
    return tensors, plain


def save(root: Path, layout: str) -> None:
    job = Job(layout, layout)
    job.train(0, STEPS_BEFORE)
    whole = job.whole()
    for name, param in job.cut.params.items():
        if isinstance(param, DTensor) and param.device_mesh.ndim == 1:
            assert same(whole[f"model/{name}"], param.full_tensor().detach()), name
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.save((whole, job.plain()), oracle_path(root, layout, rank))
    ckptlib.save(root, job.state, step_of(layout), process_group=GROUPS[LAYOUTS[layout][1]])


def load(root: Path, source: str, layout: str) -> Iterator[str]:
    """What is wrong after a load, a line each."""
    job, step = Job(layout, "other"), step_of(source)
    if step % 2:
        job.train(0, 1)  # into an optimizer that has stepped, and into one that has not
    try:
        ckptlib.load(root, job.state, step, process_group=GROUPS[LAYOUTS[layout][1]])
    except ckptlib.CkptError as error:  # on all ranks alike, so they go on together
        yield str(error)
        return
    tensors, plain = oracle_of(root, source)
    whole = job.whole()
    yield from (f"{name} differs" for name in differences(whole, tensors))
    if layout != "stages-2":
        yield from (f"{name} is absent" for name in tensors.keys() - whole.keys())
    if job.plain() != plain:
        yield f"plain values differ: {job.plain()} != {plain}"
    job.train(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
    expected = continued(root, source)
    yield from (f"{name} differs after {STEPS_AFTER} more steps" for name in differences(job.whole(), expected))


@cache
def continued(root: Path, source: str) -> Tensors:
    """What one process without ckptlib comes to from the oracle's state."""
    tensors, plain = oracle_of(root, source)
    job = Job("one", "unused")
    with torch.no_grad():
        for name, tensor in [*job.cut.params.items(), *job.cut.buffers.items()]:
            tensor.copy_(tensors[f"model/{name}"])
    for name, param in job.cut.params.items():
        job.optim.state[param] = {
            key: tensors[f"optim/{name}/{key}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")
        }
    for group, values in zip(job.optim.param_groups, plain["groups"], strict=True):
        group.update(values)
    job.sched.load_state_dict(plain["sched"])
    job.train(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER)
    return job.whole()


def main() -> None:
    root, pairs_path = Path(sys.argv[1]), Path(sys.argv[2])
    pairs = json.loads(pairs_path.read_text())
    faulthandler.dump_traceback_later(float(sys.argv[3]), exit=True)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for n in range(2, size):
        GROUPS[n] = dist.new_group(list(range(n)))
    GROUPS[size] = None
    for shape in [(2,), (3,), (4,), (8,), (2, 2)]:
        if torch.Size(shape).numel() <= size:
            mesh_of(*shape)  # by all ranks, members or not, as torch demands
    for layout in LAYOUTS:
        if layout != "one" and rank in members(layout) and any(layout == source for source, _ in pairs):
            save(root, layout)
    dist.barrier()
    wrong = []
    for source, target in pairs:
        if target != "one" and rank in members(target):
            wrong += [f"{source} -> {target}, rank {rank}: {line}" for line in load(root, source, target)]
    pairs_path.with_suffix(f".rank{rank}").write_text(json.dumps(wrong))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
