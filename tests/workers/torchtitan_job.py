"""A training as torchtitan's Trainer does it, with its containers and one of its checkpoint managers:

    torchrun torchtitan_job.py <dump folder> <steps> <step at which it is killed, or -1> <file> <whose> [<initial path>]

A step below -1: minus the step at which rank 1 is told to stop. `whose`: "ours" or "theirs", torchtitan's own manager
over DCP. The Trainer itself needs a GPU. FSDP2 over all ranks.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from ckptlib.adapters.torchtitan import CkptlibCheckpointManager


class TrainState:
    """What Trainer keeps of itself."""

    def __init__(self) -> None:
        self.step, self.ntokens_seen = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def main(folder: str, steps: int, killed_at: int, out: str, whose: str, initial: str = "") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 16), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 3))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    groups = [
        ParamGroupConfig(pattern=r"weight", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}),
        ParamGroupConfig(pattern=r"bias", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2, "weight_decay": 0.0}),
    ]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=3).build(optimizers=optimizers, training_steps=20)
    state = TrainState()
    manager = CkptlibCheckpointManager if whose == "ours" else CheckpointManager
    config = manager.Config(
        enable=True,
        interval=3,
        keep_latest_k=2,
        initial_load_path=initial or None,
        last_save_model_only=whose == "ours",
    )
    checkpointer = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
        base_folder=folder,
    )
    loaded = checkpointer.load(step=config.load_step)
    if dist.get_rank() == 0:
        print(f"loaded {loaded}, step {state.step}", flush=True)
    while state.step < steps:
        state.step += 1
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * state.step + dist.get_rank()))
        optimizers.zero_grad()
        model(x).square().mean().backward()
        checkpointer.maybe_wait_for_staging()
        optimizers.step()
        schedulers.step()
        state.ntokens_seen += 4
        checkpointer.save(state.step, last_step=state.step == steps)
        if killed_at >= 0 and state.step % 3 == 0:  # so that a slot is free at the next one, however short steps are
            checkpointer._checkpointer.pending.wait_committed()
        if state.step == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if killed_at < -1 and state.step == -killed_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    weights = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    checkpointer.close()
    if dist.get_rank() == 0:
        torch.save({"model": weights, "step": state.step, "seen": state.ntokens_seen}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
