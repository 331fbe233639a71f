"""Lightning's Trainer with a callback that saves: run it again after a kill, and it goes on within the epoch.

    python examples/lightning_trainer.py out 40
    torchrun --nproc-per-node 2 examples/lightning_trainer.py out 40

Lines that end with `# ckpt` are there for ckptlib only.
"""

import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import ckptlib  # ckpt
from ckptlib.adapters.lightning import CkptlibCallback  # ckpt
from ckptlib.data import ResumableSampler, resumable  # ckpt


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


out, steps = sys.argv[1], int(sys.argv[2])
ranks = int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(1)
data = TensorDataset(torch.randn(96, 16))
rank = int(os.environ.get("RANK", 0))  # ckpt: Lightning makes the process group later
sampler = ResumableSampler(data, 4 * ranks, seed=1, rank=rank, world_size=ranks)  # ckpt
loader = resumable(DataLoader(data, batch_sampler=sampler))  # ckpt
saves = CkptlibCallback(f"{out}/ckptlib", every=5, keep=ckptlib.Keep(last=2))  # ckpt
trainer = Trainer(
    accelerator="cpu", devices=ranks, max_steps=steps, logger=False, enable_progress_bar=False, callbacks=[saves]
)
model = Model()
trainer.fit(model, loader)
if trainer.is_global_zero:
    torch.save(model.state_dict(), f"{out}/final.pt")
