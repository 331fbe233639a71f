"""Two ranks that must resume, in a root without a step; then they save one: must_resume.py <directory>."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib
from ckptlib.errors import CheckpointNotFound


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, must_resume in (("some", rank == 1), ("all", True), ("none", False)):
        try:
            with ckptlib.Checkpointer(
                directory / "root", {"w": torch.ones(3)}, every=1, must_resume=must_resume
            ) as ckpt:
                ckpt.save(1)
        except (ValueError, CheckpointNotFound) as error:
            print(f"rank {rank}: {name}: {type(error).__name__}: {error}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
