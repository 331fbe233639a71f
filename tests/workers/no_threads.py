"""A training whose system has no thread more from its first step on: no_threads.py DIRECTORY COPIES

It ends as any other, and prints what it was told of its saves.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

import ckptlib
from ckptlib import events

NO_STACK = 1 << 46
"""More than there are addresses: a thread with such a stack cannot be started, as where a limit is reached."""

TOTAL = 6


def main(directory: str, copies: int) -> None:
    rank, weights, told = int(os.environ["RANK"]), torch.zeros(1 << 16), list[events.Event]()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    peers = ckptlib.Peers(copies=copies, every=1, domain=str(rank)) if copies else None
    with ckptlib.Checkpointer(f"{directory}/root", {"w": weights}, every=2, peers=peers, on_event=told.append) as ckpt:
        ckpt.restore()
        threading.stack_size(NO_STACK)
        for step in range(1, TOTAL + 1):
            weights += 1
            ckpt.after_step(step)
            if step == 2:
                ckpt.save(step).wait_committed()
        last = ckpt.save(TOTAL)
        last.wait_committed()
    failed = [event for event in told if isinstance(event, events.Failed)]
    held = max((event.step for event in told if isinstance(event, events.Held)), default=0)
    print(f"rank {rank}: failed {failed}, held {held}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
