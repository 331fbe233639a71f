"""A training with Lightning, whose checkpoints are ckptlib's:

    lightning_job.py <directory> <steps> <step at which it is killed, or -1> <file for the weights> <devices> <whose>

`whose`: "ours", or "theirs" for Lightning's own files.

Four batches are an epoch; checkpoints come every third step. Resumes from `last.ckpt`.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckptlib.adapters.lightning import CkptlibCheckpointIO

warnings.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 8, "names": ("a", "b")})
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optim = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optim, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optim, 2)}


class Kill(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def main(directory: Path, steps: int, killed_at: int, out: Path, devices: int, whose: str) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16 * devices, 4))
    saves = ModelCheckpoint(
        directory, every_n_train_steps=3, save_top_k=2, monitor="loss", save_last=True, filename="{step}-{loss:.3f}"
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_steps=steps,
        max_epochs=-1,
        plugins=[CkptlibCheckpointIO()] if whose == "ours" else [],
        callbacks=[saves, Kill(killed_at)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    model = Model()
    last = directory / "last.ckpt"
    trainer.fit(model, StatefulDataLoader(data, batch_size=4), ckpt_path=str(last) if last.exists() else None)
    if trainer.is_global_zero:
        torch.save({"model": model.state_dict(), "step": trainer.global_step}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
