"""A training with Lightning that a Checkpointer saves, by the callback of ckptlib:

    lightning_callback_job.py <root, or ""> <steps> <file for the end> [JSON]

Without a root nothing is saved. JSON: "at" and "how" for what happens at a step ("kill", "term", "raise"), "devices",
"validate" (batches between validations), "epochs" in place of steps, "loader" ("stateful", "ours", "stream"),
"workers", "average", "accumulate", "manual" for two optimizers, "every", "keep", "monitor" for early stopping,
"min_epochs", "from" for ckpt_path, "size" for the number of items, "drop_last" for the loader "ours".
Callers in the same process may give further callbacks as "also".

Five batches are an epoch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import ckptlib
from ckptlib.adapters.lightning import CkptlibCallback
from ckptlib.data import ResumableSampler, resumable

warnings.filterwarnings("ignore")


class Noisy(TensorDataset):
    """Draws as an augmentation does."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[0] + 0.1 * torch.randn(4)


class Stream(IterableDataset):
    """Of no known length; can tell where it is."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows, self.at = rows, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Model(LightningModule):
    """BatchNorm has a state that no optimizer owns, and dropout draws at random."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.save_hyperparameters({"names": ("a", "b")})
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        self.log("loss", loss)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if not self.automatic_optimization:
            return [torch.optim.AdamW(self.net[i].parameters(), lr=0.05) for i in (0, 3)]
        optim = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optim, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optim, 2)}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = {"batches": self.seen}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]["batches"]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += 1


class Data(LightningDataModule):
    """Has a state of its own."""

    def __init__(self, size: int, loader: str, workers: int, drop_last: bool) -> None:
        super().__init__()
        self.drop_last = drop_last
        self.data, self.loader, self.workers, self.epochs = Noisy(torch.randn(size, 4)), loader, workers, 0

    def train_dataloader(self) -> Any:
        self.epochs += 1
        if self.loader == "ours":
            sampler = ResumableSampler(self.data, 4 * self.trainer.world_size, seed=1, drop_last=self.drop_last)
            return resumable(DataLoader(self.data, batch_sampler=sampler, num_workers=self.workers))
        if self.loader == "stream":
            return StatefulDataLoader(Stream(self.data.tensors[0]), batch_size=4)
        return StatefulDataLoader(self.data, batch_size=4, shuffle=True, num_workers=self.workers)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data.tensors[0][:8], 4)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]


class Hurt(Callback):
    """Ends the process, or its training."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how = at, how

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step != self.at:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "term":
            if trainer.global_rank == trainer.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
        else:
            raise RuntimeError("as asked")


class Hooks(Callback):
    """Notes what Lightning calls, and when."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def _note(self, trainer: Trainer, name: str) -> None:
        self.called.append(f"{name} {trainer.current_epoch} {trainer.global_step}")

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._note(trainer, "batch")

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._note(trainer, "validation")

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self._note(trainer, "epoch")


def main(root: str, steps: int, out: Path, asked: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    devices, validate = asked.get("devices", 1), asked.get("validate")
    hooks = Hooks()
    callbacks: list[Any] = [*asked.get("also", []), hooks, Hurt(asked.get("at", -1), asked.get("how", "kill"))]
    if asked.get("average"):
        callbacks.append(EMAWeightAveraging(decay=0.9))
    if asked.get("monitor"):
        callbacks.append(EarlyStopping("val_loss", patience=2, check_on_train_epoch_end=False))
    if root:
        keep = ckptlib.Keep(**asked["keep"]) if "keep" in asked else None
        callbacks.append(CkptlibCallback(root, every=asked.get("every", 3), keep=keep))
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_steps=-1 if "epochs" in asked else steps,
        max_epochs=asked.get("epochs", -1),
        min_epochs=asked.get("min_epochs"),
        limit_val_batches=2 if validate else 0,
        val_check_interval=validate,
        check_val_every_n_epoch=None if validate else 1,
        accumulate_grad_batches=asked.get("accumulate", 1),
        callbacks=callbacks,
        enable_checkpointing=bool(root or asked.get("also")),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out.parent,
    )
    model = Model(asked.get("manual", False))
    size, drop_last = asked.get("size", 4 * 5 * devices), asked.get("drop_last", False)
    data = Data(size, asked.get("loader", "stateful"), asked.get("workers", 0), drop_last)
    trainer.fit(model, data, ckpt_path=asked.get("from"))
    if trainer.is_global_zero:
        optims = [optimizer.state_dict()["state"] for optimizer in trainer.optimizers]
        told = {"step": trainer.global_step, "epoch": trainer.current_epoch, "seen": model.seen, "hooks": hooks.called}
        torch.save({"model": model.state_dict(), "optims": optims, **told}, out)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), json.loads([*sys.argv, "{}"][4]))
