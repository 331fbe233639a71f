"""Two ranks that save to a root which is moved away between two saves: root_gone.py <directory>."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib
from ckptlib.errors import SaveFailed

PATIENCE_S = 60.0


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    root, w = directory / "root", torch.zeros(3000)
    with contextlib.suppress(SaveFailed), ckptlib.Checkpointer(root, {"w": ckptlib.PerRank(w)}, every=10**9) as ckpt:
        ckpt.save(1).wait_committed(PATIENCE_S)
        dist.barrier()
        if dist.get_rank() == 0:
            root.rename(directory / "away")
        dist.barrier()
        w.fill_(2)
        ckpt.save(2)  # fails as it closes
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
