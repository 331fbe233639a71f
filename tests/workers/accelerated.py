"""A training on whatever accelerator torch finds; run by torchrun: one that dies, one that goes on, one that loads."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from helpers.inside import settle

import ckptlib
from ckptlib.staging import spare_memory
from ckptlib.staging.spare_memory import Figures

ROWS = 512


def device_of_rank(rank: int) -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, rank % torch.accelerator.device_count())


def give_figures(device: torch.device) -> None:
    """Where torch has none of a device, as of the one that it tests itself with."""
    if spare_memory.figures(device) is None:
        spare_memory.figures = lambda device: Figures(8 << 30, 0, 0, 0)


class Training:
    """A layer that all ranks hold, one of which each has a box, and a state that goes on by numbers alone."""

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(ROWS, ROWS) for _ in range(4))).to(device)
        rows = ROWS // size
        whole = torch.arange(ROWS * ROWS, dtype=torch.float32).reshape(ROWS, ROWS)
        self.box = whole[rank * rows : (rank + 1) * rows].to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.state: dict[str, object] = {
            "model": self.model,
            "optim": self.optimizer,
            "box": ckptlib.Sharded(self.box, (rank * rows, 0), (ROWS, ROWS)),
            "view": self.box.t(),
        }
        if size > 1:
            self.state["view"] = ckptlib.PerRank(self.box.t())

    @torch.no_grad()
    def body(self) -> None:
        """The same on all ranks. A kernel of torch's own fake accelerator does not wait for its stream; so do we."""
        device = self.box.device
        torch.accelerator.current_stream(device).synchronize()
        for n, p in enumerate(self.model.parameters()):
            p.grad = torch.full_like(p, 0.5 + n)
        self.optimizer.step()
        self.box += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            found |= {f"{name}.{key}": value.cpu().clone() for key, value in self.optimizer.state[p].items()}
        return {**found, "box": self.box.cpu().clone()}


def after(steps: int, device: torch.device, rank: int, size: int) -> dict[str, torch.Tensor]:
    """What a training without any checkpoint holds."""
    training = Training(device, rank, size)
    for _ in range(steps):
        training.body()
    return training.tensors()


def main(directory: Path, memory: str, what: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = device_of_rank(rank)
    torch.accelerator.set_device_index(device.index)
    give_figures(device)
    dist.init_process_group("gloo")
    training = Training(device, rank, size)
    url, arena = directory / "root", directory / "arena"
    arena.mkdir(exist_ok=True)
    if what == "load":
        del training.state["view"]
        report = ckptlib.load(url, training.state, strict=False)
        tell(rank, report.step, same(training, device, rank, size, report.step), "store")
        dist.destroy_process_group()
        return
    peers = ckptlib.Peers(copies=0, every=1, memory=memory)
    with ckptlib.Checkpointer(url, training.state, every=5, peers=peers, arena=arena) as ckpt:
        report = ckpt.restore()
        if what == "restore":
            tell(rank, report.step, same(training, device, rank, size, report.step), "memory")
        for step in ckpt.loop(report.step, 10):
            training.body()
            if what == "die":
                settle(ckpt, 150, persisted=True)  # a step for which no slot is free would have no snapshot
                dist.barrier()
                if step == 7:  # the snapshot of step 7 is held by all when that of step 8 is begun
                    os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


def same(training: Training, device: torch.device, rank: int, size: int, step: int) -> bool:
    expected, found = after(step, device, rank, size), training.tensors()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def tell(rank: int, step: int, exact: bool, tier: str) -> None:
    exact = all(bool(flag) for flag in gathered(exact))
    if rank == 0:
        print(json.dumps({"step": step, "exact": exact, "tier": tier}), flush=True)


def gathered(flag: bool) -> list[object]:
    found = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([float(flag)]))
    return list(found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
