"""Run by two ranks: shards and replicas begin from a foreign file, and from a root, as one rank would read them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptlib


def main() -> None:
    at = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(37, 50), nn.Linear(50, 3))
    if dist.get_rank() == 0:
        torch.save({"model": whole.state_dict()}, at / "whole.pt")
    dist.barrier()
    ckptlib.save(at / "whole", {"model": whole}, 5)
    for source in ("whole.pt", "whole"):
        for sharded in (True, False):
            torch.manual_seed(4)
            model = nn.Sequential(nn.Linear(37, 50), nn.Linear(50, 3))
            if sharded:
                fully_shard(model)
            root = at / f"{source}-{sharded}"
            only = ["model/0*", "model/1*"][:: 1 - 2 * dist.get_rank()]  # in any order, as a set has them
            with ckptlib.Checkpointer(root, {"model": model}, every=1, init_from=at / source, init_only=only) as ckpt:
                assert ckpt.restore().step == 0
            for name, tensor in model.state_dict().items():
                found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                assert torch.equal(found, whole.state_dict()[name]), (source, sharded, name)
            if dist.get_rank() == 0:
                print("alike")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
