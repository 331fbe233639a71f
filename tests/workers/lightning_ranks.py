"""What Lightning does with a CheckpointIO on several ranks: rank 0 saves, and all load as soon as it has.

lightning_ranks.py <directory>
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ckptlib
from ckptlib.adapters.lightning import CkptlibCheckpointIO


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank, io, path = dist.get_rank(), CkptlibCheckpointIO(), directory / "last.ckpt"
    for n in range(3):
        if rank == 0:
            io.save_checkpoint({"n": n, "weight": torch.full((1000, 1000), float(n))}, path)
        dist.barrier()
        found = io.load_checkpoint(path)
        assert (found["n"], found["weight"].unique().tolist()) == (n, [n])
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: .*none\.ckpt"):
        io.load_checkpoint(directory / "none.ckpt")
    with pytest.raises(ckptlib.CkptError if rank == 0 else ValueError, match=r"all ranks have to load the same"):
        io.load_checkpoint(path if rank == 0 else directory / "other.ckpt")
    if rank == 0:
        path.write_text("{}")
    dist.barrier()
    with pytest.raises(ckptlib.FormatError, match=r"last\.ckpt: expected a line of JSON"):
        io.load_checkpoint(path)
    io.teardown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
