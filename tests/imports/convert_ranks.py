"""Run by two ranks: rank 0 imports a file, and rank 1, which does not, waits for it at a barrier."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib


def main() -> None:
    at = Path(sys.argv[1])
    dist.init_process_group("gloo")
    whole = {"w": torch.arange(10.0)}
    if dist.get_rank() == 0:
        torch.save(whole, at / "whole.pt")
        assert ckptlib.convert(at / "whole.pt", at / "root", step=3).tensors == 1
    dist.barrier()
    found = {"model": {"w": torch.zeros(10)}}
    assert ckptlib.load(at / "root", found).step == 3
    assert torch.equal(found["model"]["w"], whole["w"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
