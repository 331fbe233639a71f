"""A small FSDP2 training that saves to a bucket, and may be killed. All ranks see the same data."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.limits import hand_limits_on
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptlib

WIDTH = 512


def main(url: str, options: dict[str, Any], until: int, kill_at: int | None, result: str) -> None:
    hand_limits_on()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    model = fully_shard(torch.nn.Sequential(*layers))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    with ckptlib.Checkpointer(url, state, every=2, keep=ckptlib.Keep(last=2), storage_options=options) as ckpt:
        start = ckpt.restore().step
        for step in ckpt.loop(start, until):
            if step + 2 == kill_at and ckpt.pending is not None:
                ckpt.pending.wait_committed(60)  # a busy machine would leave nothing to resume from
            if step + 1 == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            batch = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().numpy().tobytes())
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps({"start": start, "weights": digest.hexdigest()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
