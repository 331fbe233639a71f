"""examples/dcp_train.py, killed on rank 1 where that is asked for; its state at the end goes into a file:

torchrun dcp_train.py <directory> <steps> <step at which rank 1 is killed, or -1> <file for the full state>

One rank alone may look for the newest step: a writer that was left alone may commit between the looks of two.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from places import ROOT
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckptlib

sys.path.insert(0, str(ROOT / "examples"))
import dcp_train as example


def main(directory: Path, steps: int, killed_at: int, out: Path) -> None:
    dist.init_process_group("gloo")
    draw, listed = example.batch, ckptlib.checkpoints

    def batch(step: int) -> torch.Tensor:
        if step + 1 == killed_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return draw(step)

    def checkpoints(root: Path) -> Iterator[ckptlib.CheckpointInfo]:
        assert dist.get_rank() == 0, "another rank looks, too"
        return listed(root)

    example.batch = batch
    ckptlib.checkpoints = checkpoints
    app, losses, start = example.train(directory, steps)
    full = StateDictOptions(full_state_dict=True)
    model, optim = get_state_dict(app.model, app.optim, options=full)
    if dist.get_rank() == 0:
        torch.save({"model": model, "optim": optim, "losses": losses, "start": start}, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
