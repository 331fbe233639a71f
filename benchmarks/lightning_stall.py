"""How long does Lightning's Trainer stand still for a checkpoint, with its own files and with ckptlib's?

One process, a stack of linear layers under AdamW, a checkpoint every fourth step; in turns, in the same run. The stall
is what the hooks of the saving callback take, and what the next optimizer step waits for the copy. Lightning does not
flush its files; ckptlib does, beside the training. The first checkpoint of each turn is left out: it allocates.
"""

from __future__ import annotations

import logging
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.trainers import CHECKPOINTS, EVERY, stalls_in_turns

SUBJECTS = ("ModelCheckpoint", "AsyncCheckpointIO", "CkptlibCheckpointIO", "CkptlibCallback")


def main(arguments: list[str]) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    stalls_in_turns("lightning_stall", __doc__, arguments, SUBJECTS, train)


def train(subject: str, directory: Path, nbytes: int) -> list[float]:
    """Seconds of each checkpoint, with the wait behind it."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    from ckptlib.adapters.lightning import CkptlibCallback, CkptlibCheckpointIO

    took: list[float] = []
    waited: list[float] = []

    class Model(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            width = max(16, int((nbytes / 3 / 4 / 8) ** 0.5))
            self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
            self.data = [torch.randn(width) for _ in range(64)]

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.layers(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.data, 32)  # type: ignore[arg-type]

    def timed(base: type[Callback]) -> type[Callback]:
        class Timed(base):  # type: ignore[misc, valid-type]
            def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
                ours = getattr(self, "_checkpointer", None)
                waited.append(0.0 if ours is None else ours.fence_waited_s)
                began = time.perf_counter()
                super().on_train_batch_end(trainer, *args)
                took.append(time.perf_counter() - began)

            def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
                began = time.perf_counter()
                super().on_train_epoch_start(trainer, *args)
                if took:  # of the step before
                    took[-1] += time.perf_counter() - began

        return Timed

    plugins: list[Any] = []
    if subject == "CkptlibCallback":
        saves = timed(CkptlibCallback)(directory, every=EVERY)
    else:
        saves = timed(ModelCheckpoint)(directory, every_n_train_steps=EVERY, save_top_k=-1)
        plugins = {"AsyncCheckpointIO": [AsyncCheckpointIO()], "CkptlibCheckpointIO": [CkptlibCheckpointIO()]}.get(
            subject, []
        )
    torch.manual_seed(0)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=EVERY * CHECKPOINTS + 2,
        callbacks=[saves],
        plugins=plugins,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(Model())
    steps = range(EVERY, EVERY * CHECKPOINTS + 1, EVERY)
    return [took[step - 1] + waited[step] - waited[step - 1] for step in steps]


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
