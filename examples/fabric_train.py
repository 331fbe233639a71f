"""Lightning's Fabric with checkpoints by ckptlib: run it again after a kill, and it goes on within the epoch.

    python examples/fabric_train.py out 40
    torchrun --nproc-per-node 2 examples/fabric_train.py out 40

Lines that end with `# ckpt` are there for ckptlib only.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from ckptlib.adapters.lightning import CkptlibCheckpointIO  # ckpt
from ckptlib.data import ResumableSampler, resumable  # ckpt

out, steps = sys.argv[1], int(sys.argv[2])
ranks = int(os.environ.get("WORLD_SIZE", 1))
saves = CkptlibCheckpointIO()  # ckpt
fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", plugins=[saves])
fabric.launch()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
model, optim = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
data = TensorDataset(torch.randn(32, 16))
loader = resumable(DataLoader(data, batch_sampler=ResumableSampler(data, 4 * ranks, seed=1)))  # ckpt
state = {"model": model, "optim": optim, "loader": loader, "step": 0}

path = f"{out}/last.ckpt"
if Path(path).exists():
    fabric.load(path, state)
fabric.print(f"from step {state['step']}")
while state["step"] < steps:
    for (x,) in loader:
        fabric.backward(model(x).square().mean())
        optim.step()
        optim.zero_grad()
        state["step"] += 1
        if state["step"] % 5 == 0:
            fabric.save(path, state)
        if state["step"] == steps:
            break
saves.teardown()  # ckpt: waits for the last one
if fabric.is_global_zero:
    torch.save(model.state_dict(), f"{out}/final.pt")
