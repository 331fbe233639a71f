"""A training loop with Accelerate, whose checkpoints are ckptlib's, on one rank or under torchrun:

    accelerate_job.py <directory> <epochs> <step at which it is killed, or -1> <file for the weights> <whose>

`whose`: "ours"; or "never" for a run that saves nothing.

Five batches are an epoch; checkpoints come every third step. Resumes where there is a checkpoint.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckptlib.adapters.accelerate import CkptlibAccelerator


class Place:
    """How far the training is: registered for checkpointing."""

    def __init__(self) -> None:
        self.epoch, self.batches = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.batches = state["epoch"], state["batches"]


def main(directory: Path, epochs: int, killed_at: int, out: Path, whose: str) -> None:
    torch.set_num_threads(1)
    project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, total_limit=2)
    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    kind = CkptlibAccelerator if whose == "ours" else Accelerator
    accelerator = kind(cpu=True, project_config=project, dataloader_config=loading)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4 * 5 * accelerator.num_processes, 4))
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 2 * accelerator.num_processes)
    loader = DataLoader(data, batch_size=4, shuffle=True)
    model, optim, scheduler, loader = accelerator.prepare(model, optim, scheduler, loader)
    place = Place()
    accelerator.register_for_checkpointing(place)
    torch.manual_seed(accelerator.process_index)

    batches = loader
    if any((directory / "checkpoints").glob("*checkpoint_*")):
        accelerator.load_state()
        accelerator.project_configuration.iteration = (5 * place.epoch + place.batches) // 3
        batches = accelerator.skip_first_batches(loader, place.batches)
    for epoch in range(place.epoch, epochs):
        for (x,) in batches:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optim.step()
            scheduler.step()
            optim.zero_grad()
            place.batches += 1
            step = 5 * epoch + place.batches
            if step % 3 == 0 and whose != "never":
                accelerator.save_state()
            if step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
        place.epoch, place.batches, batches = epoch + 1, 0, loader
    accelerator.end_training()
    if accelerator.is_main_process:
        state = {"model": accelerator.unwrap_model(model).state_dict(), "optim": optim.state_dict()["state"]}
        torch.save({**state, "scheduler": scheduler.state_dict()["last_epoch"]}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
