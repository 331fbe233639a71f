"""Run by two ranks: what FSDP2 saved over them is exported, and torch's own load cuts it along another dim."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import ckptlib


def main() -> None:
    at = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = nn.Linear(37, 51)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh)
    ckptlib.save(at / "root", {"model": model}, 5)
    if dist.get_rank() == 0:
        ckptlib.export(at / "root", at / "out", format="dcp")
    dist.barrier()
    for dim in (0, 1):
        found = distribute_tensor(torch.zeros(51, 37), mesh, [Shard(dim)])
        bias = torch.zeros(51)
        dcp.load({"model": {"weight": found, "bias": bias}}, checkpoint_id=at / "out")
        assert torch.equal(found.full_tensor(), expected["weight"])
        assert torch.equal(bias, expected["bias"])
        if dist.get_rank() == 0:
            print("alike")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
