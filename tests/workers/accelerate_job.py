"""A training loop with Accelerate, whose checkpoints are ckptlib's, on one rank or under torchrun:

    accelerate_job.py <directory> <epochs> <step at which it is killed, or -1> <file for the weights> <whose>

`whose`: "ours"; or "never" for a run that saves nothing. "-fsdp2" behind it: sharded by Accelerate's own FSDP2, which
it offers on accelerators only and which runs on CPUs as well; so it is told that it has been chosen.

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
from accelerate.utils import (
    DataLoaderConfiguration,
    DistributedType,
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
)
from torch import nn
from torch.distributed.tensor import DTensor
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


def choose_fsdp2(accelerator: Accelerator) -> None:
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=10, cpu_ram_efficient_loading=False
    )
    assert accelerator.is_fsdp2


def whole(state: Any) -> Any:
    """With tensors that were sharded put together. Collective."""
    return torch.utils._pytree.tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, state)


def main(directory: Path, epochs: int, killed_at: int, out: Path, whose: str) -> None:
    torch.set_num_threads(1)
    project = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, total_limit=2)
    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
    whose, _, sharded = whose.partition("-")
    kind = CkptlibAccelerator if whose == "ours" else Accelerator
    accelerator = kind(cpu=True, project_config=project, dataloader_config=loading)
    if sharded:
        choose_fsdp2(accelerator)
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
    state = whole({"model": accelerator.unwrap_model(model).state_dict(), "optim": optim.state_dict()["state"]})
    if sharded:
        assert {type(param) for param in model.parameters()} == {DTensor}
    accelerator.end_training()
    if accelerator.is_main_process:
        torch.save({**state, "scheduler": scheduler.state_dict()["last_epoch"]}, out)
    # DDP's destructor joins gloo's threads with the GIL held, which they need to let go of the last tensors: one of 65
    # runs hung here (torch 2.13). All is on disk.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
