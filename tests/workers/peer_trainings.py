"""Trainings whose every bit after a step is known, for jobs that keep snapshots in the memory of several hosts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from helpers.old_torch import FSDP2_ON_THE_HOST
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override
from workers.crash_jobs import Teller

WIDTHS = {"fsdp": 64, "ddp": 288, "hsdp": 384}
"""Of layers; where others hold the same, a rank's shard of a weight is large enough to be copied by them."""


def _be_a_group() -> None:
    """One rank is a group, too."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _shard(model: torch.nn.Module, mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """Makes of the parameters what fully_shard makes; returns the forward pass, which gathers them."""
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    for layer in model.children():
        for name, parameter in [*layer.named_parameters()]:
            setattr(layer, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))

    def gathered(parameter: torch.Tensor) -> torch.Tensor:
        assert isinstance(parameter, DTensor)
        whole = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
        whole.register_hook(lambda gradient: gradient / mesh.size())  # to be added up
        return whole

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, {n: gathered(p) for n, p in model.named_parameters()}, x)

    return forward


class Training:
    """A model and an optimizer, whose every bit after a step follows from the number of ranks and of that step."""

    def __init__(self, kind: str, rank: int, own_data: bool) -> None:
        """`own_data`: drawn by each rank from its own generator; else alike on all.

        Means over 1, 2 or 4 equal gradients are exact, so these numbers of ranks come to the same.
        """
        _be_a_group()
        torch.manual_seed(0)
        self._width = WIDTHS[kind]
        self.model = torch.nn.Sequential(*[torch.nn.Linear(self._width, self._width) for _ in range(4)])
        self._forward: Callable[[torch.Tensor], torch.Tensor] = self.model
        if kind in ("fsdp", "hsdp"):
            size, replicas = dist.get_world_size(), 2 if kind == "hsdp" and dist.get_world_size() > 1 else 1
            mesh = init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("replicas", "shards"))
            mesh = mesh if replicas > 1 else mesh["shards"]
            if FSDP2_ON_THE_HOST:
                for layer in self.model:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.model, mesh=mesh)
            else:
                self._forward = _shard(self.model, mesh)
        else:
            self._forward = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.state: dict[str, object] = {"model": self.model, "optim": self.optimizer}
        self._own_data = own_data
        torch.manual_seed(1000 + rank)

    def body(self, step: int) -> None:
        generator = None if self._own_data else torch.Generator().manual_seed(step)
        self._forward(torch.randn(4, self._width, generator=generator)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def drift(self) -> None:
        """Makes this rank's weights others than those of the ranks that have replicas of them."""
        for parameter in self.model.parameters():
            parameter.add_(1.0)

    def digest(self) -> str:
        """Of all weights, all of the optimizer's state and, where they count, this rank's generators. Collective."""
        found = hashlib.sha256()
        for name, parameter in self.model.named_parameters():
            for key, value in (("", parameter.detach()), *sorted(self.optimizer.state[parameter].items())):
                whole = value.full_tensor() if isinstance(value, dist.tensor.DTensor) else value
                found.update(f"{name} {key} {whole.dtype}".encode() + whole.numpy().tobytes())
        if self._own_data:
            found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()[:16]


class Stages(Training):
    """Layers that learn apart from one another: each rank has some of them, and an optimizer of its own."""

    def __init__(self, rank: int) -> None:
        _be_a_group()
        torch.manual_seed(0)
        layers, size = [torch.nn.Linear(64, 64) for _ in range(4)], dist.get_world_size()
        mine = range(rank * len(layers) // size, (rank + 1) * len(layers) // size)
        self._layers = {i: layers[i] for i in mine}
        groups = [{"params": [*layer.parameters()], "lr": 1e-3 * (i + 1)} for i, layer in self._layers.items()]
        self.optimizer = torch.optim.AdamW(groups)
        self.model = torch.nn.Sequential()
        for i, layer in self._layers.items():
            self.model.add_module(str(i), layer)
        self.state = {"model": self.model, "optim": self.optimizer}
        torch.manual_seed(1000 + rank)

    @override
    def body(self, step: int) -> None:
        for i, layer in self._layers.items():
            generator = torch.Generator().manual_seed(4 * step + i)
            layer(torch.randn(4, 64, generator=generator)).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.99

    @override
    def digest(self) -> str:
        mine = []
        for layer, group in zip(self._layers.values(), self.optimizer.param_groups, strict=True):
            found = hashlib.sha256(str(group["lr"]).encode())
            for parameter in layer.parameters():
                for _, value in (("", parameter.detach()), *sorted(self.optimizer.state[parameter].items())):
                    found.update(value.numpy().tobytes())
            mine.append(found.hexdigest()[:8])
        stages: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(stages, mine)
        return " ".join(digest for stage in stages for digest in stage)


def training_of(kind: str, rank: int, own_data: bool) -> Training:
    if kind == "stages":
        return Stages(rank)
    return Training(kind, rank, own_data)


def practise(tell: Teller, rank: int, *, kind: str, own_data: bool, total: int) -> None:
    """The same training without ckptlib: what all others must come to."""
    training = training_of(kind, rank, own_data)
    for step in range(total):
        training.body(step)
        tell("digest", step=step + 1, digest=training.digest())
