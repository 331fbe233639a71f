"""Lightning: a Trainer with a ModelCheckpoint, resumed by `ckpt_path="last"`, as its documentation says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from benchmarks.conformance import libraries

FILE = "step={}.ckpt"


class _Model(LightningModule):
    """Holds the tensors as buffers; a step of the training puts others there."""

    def __init__(self, tensors: dict[str, torch.Tensor], to_train: dict[str, torch.Tensor] | None) -> None:
        super().__init__()
        self.held = libraries.module(tensors)
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.loaded: dict[str, torch.Tensor] = {}
        self._to_train = to_train

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_start(self) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in self.held.named_buffers()}
        if self._to_train is None:
            self.trainer.should_stop = True

    def training_step(self, batch: object, number: int) -> torch.Tensor:
        for name, tensor in self.held.named_buffers():
            if self._to_train is not None:
                tensor.copy_(self._to_train[name])
        return self.unused.sum()


def train(root: Path, tensors: dict[str, torch.Tensor], step: int, background: bool) -> None:
    """Resumes, trains until `step`, whose tensors are `tensors`, and ends when the checkpoints are written."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    last = "last" if step > 1 else None
    _trainer(root, step, background).fit(_Model(targets, tensors), _data(), ckpt_path=last)


def resume(root: Path, tensors: dict[str, torch.Tensor], step: int | None) -> dict[str, torch.Tensor]:
    """What the model holds as its training begins. `step`: None for `ckpt_path="last"`."""
    model = _Model(tensors, None)
    path = "last" if step is None else str(root / FILE.format(step))
    _trainer(root, 1000, False).fit(model, _data(), ckpt_path=path)
    return model.loaded


def _trainer(root: Path, max_steps: int, background: bool) -> Trainer:
    callback = ModelCheckpoint(
        dirpath=root,
        filename="{step}",
        every_n_train_steps=1,
        save_top_k=-1,
        save_last=True,
    )
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        callbacks=[callback],
        plugins=[AsyncCheckpointIO()] if background else None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )


def _data() -> DataLoader[Any]:
    return DataLoader(torch.zeros(2000, 1), batch_size=1)  # type: ignore[arg-type]
