"""A training with Lightning's ModelParallelStrategy, whose weights FSDP2 shards: without the callback of ckptlib, with
it, and with it in two halves. All three must end alike, bit for bit. So must two that begin with a file of Lightning's
own, of which one is in two halves, and is given that file at both starts.

lightning_sharded.py <directory>
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchdata.stateful_dataloader import StatefulDataLoader

import ckptlib
from ckptlib.adapters.lightning import CkptlibCallback

warnings.filterwarnings("ignore")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 17), nn.Dropout(0.1), nn.Linear(17, 3))
        self.began = -1

    def configure_model(self) -> None:
        if not isinstance(self.net[0].weight, DTensor):
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        self.began = self.trainer.global_step

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def trained(
    root: Path | None, steps: int, distributed: bool, file: Path | None = None, begins: int = 0
) -> list[torch.Tensor]:
    """The weights and the state of the optimizer in the end.

    `file`: where the training begins, if it is there; else where Lightning saves it. `begins`: at which step.
    """
    callbacks = [] if root is None else [CkptlibCallback(root, every=2)]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(save_distributed_checkpoint=distributed),
        max_steps=steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    data = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    model = Model()
    there = file is not None and file.exists()
    trainer.fit(model, StatefulDataLoader(data, batch_size=4), ckpt_path=file if there else None)
    assert model.began == begins, f"{root}: begins at step {model.began}, expected {begins}"
    if file is not None and not there:
        trainer.save_checkpoint(file)
    state = trainer.optimizers[0].state
    tensors = [*model.parameters(), *(value for each in model.parameters() for value in state[each].values())]
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def main(directory: Path) -> None:
    for distributed in (True, False):
        root = directory / str(distributed)
        alone = trained(None, 6, distributed)
        watched = trained(root / "whole", 6, distributed)
        trained(root / "parted", 3, distributed)
        parted = trained(root / "parted", 6, distributed, begins=3)
        assert all(map(torch.equal, alone, watched)), "saving changes nothing"
        assert all(map(torch.equal, alone, parted))
        with ckptlib.open(root / "parted") as step:
            names = step.keys()
        assert not [name for name in names if name.startswith("trainer/")], "weights are saved once"
    file = directory / "begin.ckpt"
    trained(None, 2, True, file)
    whole = trained(directory / "whole", 6, True, file, 2)
    trained(directory / "parted", 4, True, file, 2)
    assert all(map(torch.equal, whole, trained(directory / "parted", 6, True, file, 4)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
