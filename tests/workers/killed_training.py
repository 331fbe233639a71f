"""A real training, deterministic, on one device: killed_training.py <way> <device> <directory> <memory> <what>.

What: `whole` tells of every step of a run without snapshots in memory; `killed` dies in a step, while the device still
has steps to do; `resumed` goes on, and tells what it began with, what it ended with, and what each step of the store
loads as. All tell in lines of JSON; losses and digests are those of the same step wherever it is told.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ckptlib

STEPS, EVERY, DIES = 14, 4, 9
SHARDED = {
    "fsdp": {},
    "fsdp bf16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "fsdp offload": {"offload_policy": CPUOffloadPolicy()},
}
SCALED, AVERAGED = ("amp", "channels last"), ("amp", "sgd")
WAYS = (*SHARDED, "ddp", "amp", "sgd", "foreach", "capturable", "channels last")
NEED_ACCELERATOR = ("fsdp offload",)
"""torch pins memory for it."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Training:
    def __init__(self, way: str, device: torch.device) -> None:
        self.way, self.device = way, device
        width = 64 if device.type == "cpu" else 768
        torch.manual_seed(1)
        if way == "channels last":
            layers = nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
            self.model: nn.Module = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
            shape: tuple[int, ...] = 16, 3, 32, 32
        else:
            blocks = [Block(width) for _ in range(6)]
            norm = [] if way == "fsdp bf16" else [nn.BatchNorm1d(width)]  # of another dtype than its input, there
            self.model = nn.Sequential(*blocks, *norm, nn.Linear(width, width)).to(device)
            shape = 32, width
        if way in SHARDED:
            for block in blocks:
                fully_shard(block, **SHARDED[way])
            fully_shard(self.model, **SHARDED[way])
        elif way == "ddp":
            self.model = DistributedDataParallel(self.model)
        self.optimizer = self._optimizer(list(self.model.parameters()))
        self.scaler = torch.amp.GradScaler(device.type, 2.0**30, growth_interval=3, enabled=way in SCALED)
        self.state: dict[str, object] = {"model": self.model, "optim": self.optimizer, "scaler": self.scaler}
        self.schedule = None
        if way != "capturable":  # whose rate is a tensor
            self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-3, 100, cycle_momentum=False)
            self.state["schedule"] = self.schedule
        self.average = None
        if way in AVERAGED:
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.state["average"] = self.average
        draws = torch.Generator().manual_seed(0)
        self._inputs = [torch.randn(shape, generator=draws) for _ in range(STEPS)]
        self._busy = None if device.type == "cpu" else torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
        torch.manual_seed(7)

    def _optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        if self.way == "sgd":
            return torch.optim.SGD(params, lr=0.01, momentum=0.9)
        if self.way == "foreach":
            return torch.optim.AdamW(params, lr=1e-3, foreach=True)
        if self.way == "capturable":
            rate = torch.tensor(1e-3, device=self.device)
            return torch.optim.Adam(params, lr=rate, capturable=self.device.type != "cpu", amsgrad=True)
        return torch.optim.AdamW(params, lr=1e-3, fused=True)

    def step(self, number: int) -> torch.Tensor:
        """The loss, on the device, which may still be at it: only the scaler's own look waits for it."""
        x = self._inputs[number].to(self.device)
        if self.way == "channels last":
            x = x.to(memory_format=torch.channels_last)
        half = torch.bfloat16 if self.device.type == "cpu" else torch.float16
        with torch.autocast(self.device.type, half, enabled=self.way in SCALED):
            loss = self.model(x).float().pow(2).mean()
        self.scaler.scale(loss).backward()
        if self.way in SCALED:
            self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(self.model)
        if self._busy is not None:
            for _ in range(60):  # so that the host runs ahead
                self._busy @ self._busy
        return loss.detach()

    def digests(self) -> dict[str, str]:
        """Of all tensors and the scaler, and of the generators."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        if self.average is not None:
            tensors += [*self.average.parameters(), *self.average.buffers()]
        for p in self.model.parameters():
            tensors += [value for _, value in sorted(self.optimizer.state[p].items()) if torch.is_tensor(value)]
        state = hashlib.sha256(json.dumps(self.scaler.state_dict(), sort_keys=True).encode())
        drawn = [torch.get_rng_state()]
        if self.device.type == "cuda":
            drawn.append(torch.cuda.get_rng_state())
        return {"state": _digest(state, tensors), "drawn": _digest(hashlib.sha256(), drawn)}


def _digest(found: hashlib._Hash, tensors: Iterable[torch.Tensor]) -> str:
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        found.update(local.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def main(way: str, device: torch.device, directory: Path, memory: str, what: str) -> None:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic only with this, set before it is used
    torch.use_deterministic_algorithms(True)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    if way in SHARDED or way == "ddp":
        dist.init_process_group(init_method=f"file://{directory}/meeting-{what}", rank=0, world_size=1)
    training, root = Training(way, device), directory / ("whole" if what == "whole" else "root")
    peers = None if what == "whole" else ckptlib.Peers(copies=0, every=1, memory=memory)
    with ckptlib.Checkpointer(root, training.state, every=EVERY, peers=peers) as ckpt:
        began = ckpt.restore().step
        if began:
            tell(step=began, **training.digests())
        for step in ckpt.loop(began, STEPS):
            loss = training.step(step)
            if what == "whole":
                tell(step=step + 1, loss=loss.item(), **training.digests())
            if what == "killed" and step == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
    if what == "resumed":
        tell(step=STEPS, loss=loss.item(), **training.digests())
        for info in ckptlib.checkpoints(root):
            ckptlib.load(root, training.state, step=info.step)
            tell(step=info.step, state=training.digests()["state"])
    if dist.is_initialized():
        dist.destroy_process_group()


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], torch.device(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
