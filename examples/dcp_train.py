"""A training script for torch.distributed.checkpoint (DCP) with FSDP2. Two lines are ckptlib's: they are marked.

    torchrun --nproc-per-node 2 examples/dcp_train.py runs/dcp --steps 20

Kill it at any moment, and start it again, on any number of ranks: it goes on from the newest committed step.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckptlib
from ckptlib import dcp  # ckptlib's: was import torch.distributed.checkpoint as dcp

EVERY = 2


class App:
    """Model and optimizer as DCP's tutorial has them: names of parameters, whatever the ranks and the sharding."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.model, self.optim = model, optim

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])


def newest(directory: Path) -> int:
    """ckptlib's: only whole steps are listed; 0 for none. DCP leaves it to you to find a directory whose save came to
    its end. One rank looks for all: the writer of the run before may still commit a step between the looks of two."""
    root, found = directory / "step", torch.tensor(0)
    if dist.get_rank() == 0 and root.exists():
        found.fill_(max((info.step for info in ckptlib.checkpoints(root)), default=0))
    dist.broadcast(found, 0)
    return int(found)


def batch(step: int) -> torch.Tensor:
    """Drawn from the step alone, so that a resumed run sees the same data."""
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(step))


def train(directory: Path, steps: int) -> tuple[App, list[float], int]:
    """Returns the model and optimizer, the losses, and the step it began at."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # this example runs on the host
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    app = App(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    state: dict[str, Any] = {"app": app, "losses": [], "step": 0}
    if step := newest(directory):
        dcp.load(state, checkpoint_id=directory / f"step-{step}")
    losses, start, future = state["losses"], state["step"], None
    for step in range(start, steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        app.optim.step()
        app.optim.zero_grad()
        losses.append(loss.item())
        if (step + 1) % EVERY == 0:
            if future is not None:
                future.result()  # raises where the save before failed
            state = {"app": app, "losses": losses, "step": step + 1}
            future = dcp.async_save(state, checkpoint_id=directory / f"step-{step + 1}", keep=ckptlib.Keep(last=3))
    if future is not None:
        future.result()  # committed and durable
    return app, losses, start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    _, losses, start = train(given.directory, given.steps)
    if dist.get_rank() == 0:
        print(f"from step {start} to {given.steps}: loss {losses[-1]:.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
