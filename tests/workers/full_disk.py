"""Saves to a disk that has room for a few steps: full_disk.py <root> <saves> <seconds between them>.

Each rank tells which of its saves were committed. Two steps are kept.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time

import torch
import torch.distributed as dist
from helpers.limits import hand_limits_on

import ckptlib

NBYTES = 2_000_000
"""Of each rank."""


def main() -> None:
    root, num_saves, pause_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    hand_limits_on()
    logging.basicConfig(level=logging.WARNING)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mine = torch.zeros(NBYTES // 8, dtype=torch.int64)
    state = {"all": ckptlib.Sharded(mine, (rank * len(mine),), (2 * len(mine),))}
    committed = []
    ckpt = ckptlib.Checkpointer(root, state, every=10**9, keep=ckptlib.Keep(last=2))
    for step in range(1, num_saves + 1):
        mine.fill_(1000 * step + rank)
        with contextlib.suppress(ckptlib.SaveFailed):
            ckpt.save(step).wait_committed()
            committed.append(step)
        time.sleep(pause_s)
        dist.barrier()
    with contextlib.suppress(ckptlib.SaveFailed):  # the last one
        ckpt.close()
    print(json.dumps({"rank": rank, "committed": committed}), flush=True)


if __name__ == "__main__":
    main()
