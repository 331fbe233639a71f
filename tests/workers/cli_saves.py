"""Makes a root with a history: two ranks save steps 2 and 4; one rank goes back to step 2 and saves step 3.

python -m torch.distributed.run --nproc-per-node 2 cli_saves.py ROOT two
python cli_saves.py ROOT one
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import ckptlib


def state(step: int) -> dict[str, object]:
    """Tensors of many kinds; the same on one rank and on two, but for what is per rank."""
    large = torch.arange(3_000_000, dtype=torch.float32).reshape(3000, 1000) + step
    small = torch.full((5, 3), step, dtype=torch.bfloat16)
    tensors: dict[str, object] = {
        "large": large,
        "small": small,
        "flags": torch.tensor([True, False, True]),
        "complex": torch.full((4,), step + 1j, dtype=torch.complex128),
        "count": torch.tensor(step),
    }
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (2,))
        placed: dict[str, DTensor] = {
            "large": distribute_tensor(large, mesh, [Shard(0)]),
            "small": distribute_tensor(small, mesh, [Replicate()]),
        }
        tensors.update(placed)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {
        "model": tensors,
        "cursor": ckptlib.PerRank({"rank": rank, "at": torch.tensor([rank, step])}),
        "epoch": step,
    }


def main() -> None:
    root, mode = sys.argv[1:]
    if mode == "two":
        dist.init_process_group("gloo")
        ckptlib.save(root, state(2), step=2, metrics={"loss": 2.5})
        ckptlib.save(root, state(4), step=4, metrics={"loss": float("nan")})
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)
    else:
        target = state(0)
        ckptlib.load(root, target, step=2)
        assert target["epoch"] == 2
        ckptlib.save(root, target, step=3, metrics={"loss": 2.25, "note": "rewound\x1b[31m"})


if __name__ == "__main__":
    main()
