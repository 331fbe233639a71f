"""A training loop as users of torch.distributed.checkpoint write it, with `ckptlib.dcp` in its place:

    torchrun dcp_train.py <directory> <steps> <step at which rank 1 is killed, or -1> <file for the full state>

Saves every second step, asynchronously; resumes from the newest committed step.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import ckptlib
from ckptlib import dcp


class App:
    """As in PyTorch's own tutorial."""

    def __init__(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        self.model, self.optim = model, optim

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])


def main(directory: Path, total: int, killed_at: int, out: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5))
    for part in (model[0], model[2], model):
        fully_shard(part)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    app, losses = App(model, optim), list[float]()
    state = {"app": app, "losses": losses, "step": 0}
    saved = [info.step for info in ckptlib.checkpoints(directory / "step")] if (directory / "step").exists() else []
    if saved:
        dcp.load(state, checkpoint_id=directory / f"step-{saved[-1]}")
        losses = state["losses"]  # type: ignore[assignment]
    start, future = int(state["step"]), None  # type: ignore[call-overload]
    for step in range(start, total):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 7)).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(round(loss.item(), 3))
        if step + 1 == killed_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if (step + 1) % 2 == 0:
            if future is not None:
                future.result()
            state = {"app": app, "losses": losses, "step": step + 1}
            future = dcp.async_save(state, checkpoint_id=directory / f"step-{step + 1}")
    if future is not None:
        future.result()
    model_state, optim_state = get_state_dict(model, optim, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save({"model": model_state, "optim": optim_state, "losses": losses, "start": start}, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
