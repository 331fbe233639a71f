"""Ranks that train with FSDP2 and save by `async_save(overlap=)`, whose copies are held until the optimizer waits:

    torchrun dcp_overlapped.py <directory>

In step 4 rank 1 alone writes past its fence. Each rank ends with 0 where every step that succeeded loads with its own
bits, and the save of step 4 failed on all ranks.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptlib
from ckptlib import dcp
from ckptlib.errors import SaveFailed
from ckptlib.staging.host_copies import HostCopies

STEPS = range(1, 8)
TORN = 4
WIDTH = 384
"""A share of what has fewer bytes is copied at once."""


def hold_copies() -> threading.Event:
    """Copies beside the training wait until it is set."""
    opened, move = threading.Event(), HostCopies.move

    def held(copies: HostCopies) -> None:
        assert opened.wait(60)
        move(copies)

    HostCopies.move = held  # type: ignore[method-assign]
    return opened


def local(node: Any) -> Any:
    """This rank's own bits, copied."""
    if isinstance(node, dict):
        return {key: local(value) for key, value in node.items()}
    tensor = node.to_local() if isinstance(node, DTensor) else node
    return tensor.detach().numpy().tobytes() if isinstance(tensor, torch.Tensor) else tensor


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    opened = hold_copies()
    waited = 0

    def state() -> dict[str, Any]:
        parts = get_state_dict(model, optim)
        return {"model": parts[0], "optim": parts[1]}

    def train() -> None:
        model(torch.randn(4, WIDTH)).square().sum().backward()
        optim.step()
        optim.zero_grad()

    saved: dict[int, Any] = {}
    train()
    for step in STEPS:
        opened.clear()
        mine = local(state())
        future = dcp.async_save(state(), checkpoint_id=directory / f"step-{step}", overlap=optim)
        overlaps = not future.pending.staging.copied
        may = step > STEPS[0] and not (rank == 1 and step > TORN)
        assert overlaps == may, f"rank {rank}, step {step}"
        if step == TORN and rank == 1:
            next(model.parameters()).to_local().detach().numpy().fill(3)
        opening = threading.Timer(0.2 * rank, opened.set)
        opening.start()
        train()
        waited += overlaps and local(state()) != mine
        try:
            assert future.result(60) == step
            saved[step] = mine
        except SaveFailed:
            assert step == TORN
        opening.join()
    assert sorted(saved) == [step for step in STEPS if step != TORN]
    assert [info.step for info in ckptlib.checkpoints(directory / "step")] == sorted(saved)
    for step, mine in saved.items():
        into = state()
        dcp.load(into, checkpoint_id=directory / f"step-{step}")
        assert local(into) == mine, f"rank {rank}, step {step}"
    assert waited >= 2
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
