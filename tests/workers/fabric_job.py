"""A loop with Lightning's Fabric, whose checkpoints are ckptlib's:

    fabric_job.py <directory or URL> <steps> <step at which it is killed, or -1> <file for the weights> <devices>

Saves every third step, to the same path; four batches are an epoch. Resumes from there.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import nn

from ckptlib.adapters.lightning import CkptlibCheckpointIO

warnings.filterwarnings("ignore")


def main(directory: str, steps: int, killed_at: int, out: str, devices: int) -> None:
    torch.manual_seed(0)
    plugin = CkptlibCheckpointIO()
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", plugins=[plugin])
    fabric.launch()
    data = torch.randn(16 * devices, 4)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    path = f"{directory}/last.ckpt"
    if get_filesystem(path).exists(path):
        fabric.load(path, state)
    while state["step"] < steps:
        at = state["step"] % 4 * 4 * devices + 4 * fabric.global_rank
        fabric.backward(model(data[at : at + 4]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        state["step"] += 1
        if state["step"] % 3 == 0:
            fabric.save(path, state)
        if state["step"] == killed_at:
            plugin.load_checkpoint(path)  # waits until it is committed
            fabric.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
    if fabric.is_global_zero:
        torch.save({"model": model.state_dict(), "step": state["step"]}, out)
        plugin.teardown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]))
