"""Lightning: a Trainer with a ModelCheckpoint, resumed by `ckpt_path="last"`, as its documentation says."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from benchmarks.conformance.library import module

FILE = "step={}.ckpt"


class _Loaded(Exception):
    """Ends a training that has been restored, before it writes anything."""


class _Model(LightningModule):
    """Holds the tensors as buffers; a step of the training puts others there."""

    def __init__(self, tensors: dict[str, torch.Tensor], to_train: dict[str, torch.Tensor] | None) -> None:
        super().__init__()
        self.held = module(tensors)
        self.unused = torch.nn.Parameter(torch.zeros(1))
        self.loaded: dict[str, torch.Tensor] = {}
        self._to_train = to_train

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_start(self) -> None:
        self.loaded = {name: tensor.clone() for name, tensor in self.held.named_buffers()}
        if self._to_train is None:
            raise _Loaded

    def training_step(self, batch: object, number: int) -> torch.Tensor:
        for name, tensor in self.held.named_buffers():
            if self._to_train is not None:
                tensor.copy_(self._to_train[name])
        return self.unused.sum()


def train(url: str, tensors: dict[str, torch.Tensor], step: int, background: bool) -> None:
    """Goes on from the step before until `step`, whose tensors are `tensors`; ends when all is written."""
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    by_name = f"{url}/{FILE.format(step - 1)}" if "://" in url else "last"  # which it does not find in a bucket
    before = by_name if step > 1 else None
    _trainer(url, step, background).fit(_Model(targets, tensors), _data(), ckpt_path=before)


def resume(url: str, tensors: dict[str, torch.Tensor], step: int | None) -> dict[str, torch.Tensor]:
    """What the model holds as its training begins. `step`: None for `ckpt_path="last"`."""
    model = _Model(tensors, None)
    path = "last" if step is None else f"{url}/{FILE.format(step)}"
    with suppress(_Loaded):
        _trainer(url, 1000, False).fit(model, _data(), ckpt_path=path)
    return model.loaded


def _trainer(url: str, max_steps: int, background: bool) -> Trainer:
    callback = ModelCheckpoint(
        dirpath=url,
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
        default_root_dir=url,
    )


def _data() -> DataLoader[Any]:
    return DataLoader(torch.zeros(2000, 1), batch_size=1)  # type: ignore[arg-type]
