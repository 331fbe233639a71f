"""Writes a root to be kept: run once per release, never again over what is there.

    torchrun --standalone --nproc-per-node 2 tests/data/write.py tests/data/written-by-0.2

Four steps, three of them increments. The first is dropped, and the others use its packs; the third carries what had not
changed into packs of its own, as if `ckptlib refresh` had been asked for.
What it holds is written beside it, by json and bytes alone, so that the test needs nothing of ckptlib to know it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ckptlib


def describe(tensor: torch.Tensor) -> list[object]:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    data = whole.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(whole.dtype).removeprefix("torch."), list(whole.shape), data.hex()]


def main(target: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 5), nn.Linear(5, 7, bias=False))
    model[1].to(torch.bfloat16)
    for layer in model:
        fully_shard(layer)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {
        "model": model,
        "optim": optim,
        "plain": {"scale": torch.tensor(2.5), "fp8": torch.arange(5).to(torch.float8_e4m3fn)},
        "mine": ckptlib.PerRank(torch.tensor([rank, 10 * rank])),
        "cut": ckptlib.Sharded(torch.full((2, 3), float(rank)), offset=(2 * rank, 0), shape=(4, 3)),
        "tied": [torch.ones(3), None, (1, "two", 3.5)],
        "epoch": 4,
        "frozen": [torch.arange(20_000.0), -torch.arange(20_000.0)],
    }
    state["tied"][1] = state["tied"][0]
    tags, keep = {"why": "kept"}, ckptlib.Keep(last=3)
    with ckptlib.Checkpointer(target / "root", state, every=1000, keep=keep, tags=tags) as ckpt:
        for step in range(4):
            for i, param in enumerate(model.parameters()):
                param.grad = torch.full_like(param, 0.1 * (i + 1) * (step + 1))
            optim.step()
            if step == 2 and rank == 0:
                [second] = (target / "root/steps").glob("000000000002-*.json")
                second.with_suffix(".refresh").touch()
            dist.barrier()
            ckpt.save(step + 1).wait_committed()
    names = {f"model/{name}": describe(p) for name, p in model.named_parameters()}
    for name, param in model.named_parameters():
        names |= {f"optim/model/{name}/{key}": describe(value) for key, value in optim.state[param].items()}
    if rank == 0:
        (target / "expected.json").write_text(json.dumps(names, indent=1))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
