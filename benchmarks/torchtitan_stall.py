"""How long does torchtitan's loop stand still for a checkpoint, with its own manager and with ckptlib's?

One process, a stack of linear layers under FSDP2 and AdamW, in torchtitan's containers, and a checkpoint every fourth
step; in turns, in the same run. The stall is what `save` takes, and what the next step waits in
`maybe_wait_for_staging` and at ckptlib's fence. Each checkpoint begins once the one before is written: else a loop
whose steps are short would wait for that. All flush what they write. The first checkpoint of each turn is left out: it
allocates.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.trainers import CHECKPOINTS, EVERY, stalls_in_turns

SUBJECTS = ("disabled", "async", "ckptlib")
"""The first two are `async_mode` of torchtitan's own manager."""


def main(arguments: list[str]) -> None:
    logging.disable(logging.INFO)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stalls_in_turns("torchtitan_stall", __doc__, arguments, SUBJECTS, train)
    dist.destroy_process_group()


def train(subject: str, directory: Path, nbytes: int) -> list[float]:
    """Seconds of each checkpoint, with the wait behind it."""
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

    torch.manual_seed(0)
    width = max(16, int((nbytes / 3 / 4 / 8) ** 0.5))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(8)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    groups = [ParamGroupConfig(pattern=".", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-4})]
    optimizers = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(optimizers=optimizers, training_steps=1000)
    manager = config(subject).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={},
        sd_adapter=None,
        base_folder=str(directory),
    )
    manager.load(step=-1)
    stalls: list[float] = []
    for step in range(1, EVERY * CHECKPOINTS + 2):
        optimizers.zero_grad()
        model(torch.randn(32, width)).square().mean().backward()
        began, fence = time.perf_counter(), fenced(manager)
        manager.maybe_wait_for_staging()
        waited = time.perf_counter() - began
        optimizers.step()
        schedulers.step()
        if (step - 1) % EVERY == 0 and stalls:
            stalls[-1] += waited + fenced(manager) - fence
        if step % EVERY == 0:
            finish(manager)
        began = time.perf_counter()
        saved = manager.save(step)
        if saved:
            stalls.append(time.perf_counter() - began)
        assert saved == (step % EVERY == 0), f"{subject}: step {step}"
    finish(manager)
    manager.close()
    return stalls


def config(subject: str) -> Any:
    from torchtitan.components.checkpointer import CheckpointManager

    from ckptlib.adapters.torchtitan import CkptlibCheckpointManager

    options: dict[str, Any] = {"enable": True, "interval": EVERY, "keep_latest_k": 2}
    if subject == "ckptlib":
        return CkptlibCheckpointManager.Config(**options)
    return CheckpointManager.Config(**options, async_mode=subject)


def fenced(manager: Any) -> float:
    """Seconds that ckptlib has made optimizer steps wait, all in all."""
    ours = getattr(manager, "_checkpointer", None)
    return 0.0 if ours is None else ours.fence_waited_s


def finish(manager: Any) -> None:
    """Waits until the last checkpoint is written."""
    ours = getattr(manager, "_checkpointer", None)
    if ours is None:
        manager.maybe_wait_for_saving()
    elif ours.pending is not None:
        ours.pending.wait_committed()


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
