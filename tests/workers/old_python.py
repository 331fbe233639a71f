"""A training by a Python that was built on an old system, as conda's are: old_python.py DIRECTORY WHAT

What: `whole` ends; `killed` dies by SIGKILL right after it has ordered its last save. Its writer is of the same Python,
since it finds `sitecustomize` on the path of its trainer.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib

OLD = Path(__file__).with_suffix("")
TOTAL = 6


def main(directory: str, what: str) -> None:
    sys.path.insert(0, str(OLD))
    runpy.run_path(str(OLD / "sitecustomize.py"))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, weights = dist.get_rank(), torch.zeros(1 << 18)
    peers = ckptlib.Peers(copies=1, every=1, domain=str(rank))
    state = {"w": weights, "many": {str(n): torch.zeros(5) for n in range(100)}}
    arena = f"{directory}/{what}"  # of its own, so that what was killed is read from the store
    os.makedirs(arena, exist_ok=True)
    with ckptlib.Checkpointer(f"{directory}/root", state, every=2, peers=peers, arena=arena) as ckpt:
        restored = ckpt.restore()
        print(f"rank {rank}: restored {restored.step}, weights {weights.unique().tolist()}", flush=True)
        for step in range(restored.step + 1, restored.step + TOTAL + 1):
            weights += 1
            for small in state["many"].values():
                small += 1
            ckpt.after_step(step)
        pending = ckpt.save(step)
        if what == "killed":
            pending.wait_staged()
            os.kill(os.getpid(), signal.SIGKILL)
        pending.wait_committed()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
