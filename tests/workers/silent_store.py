"""One rank of two whose store is another process, which stops for a while, and is killed in the end.

silent_store.py <port> <pid>: of that process. Says "rank <n> done" at its end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers.writers import stop
from torch._C._distributed_c10d import PrefixStore

from ckptlib.errors import AgreementFailed
from ckptlib.ranks.connections import shared_by
from ckptlib.ranks.meeting import meet

PATIENCE = timedelta(seconds=60)
SOON = timedelta(seconds=1)
STORE = int(sys.argv[2])


def comes_in_vain(place: str) -> None:
    """The store says nothing until this rank has given up; then it answers what was asked of it."""
    stop(STORE)
    with pytest.raises(AgreementFailed, match=r"save on rank 1: the store of .* has not answered within 6 s"):
        meet(None, place, "save", SOON)
    os.kill(STORE, signal.SIGCONT)
    for thread in threading.enumerate():
        if thread.name == "ckptlib-store":
            thread.join(PATIENCE.total_seconds())


def nobody_else_is_there() -> None:
    """The ranks find each other again: the meeting that nobody else came to is given up."""
    meet(None, "here", "save", PATIENCE)
    dist.barrier()
    if dist.get_rank() == 1:
        comes_in_vain("here")
    dist.barrier()
    meet(None, "here", "save", PATIENCE)


def another_rank_waits() -> None:
    """It does not take the one that has left for one that has come."""
    world = dist.group.WORLD
    assert world is not None
    if dist.get_rank() == 0:
        with pytest.raises(AgreementFailed, match=r"save on rank 0: rank 1 has left"):
            meet(None, "there", "save", PATIENCE)
    else:
        meetings = PrefixStore("meetings/there", shared_by(world, PATIENCE).store)
        meetings.wait(["0/count"], PATIENCE)
        comes_in_vain("there")
    meet(None, "there", "save", PATIENCE)


def it_is_gone() -> None:
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(STORE, signal.SIGKILL)
    dist.barrier()
    with pytest.raises(AgreementFailed, match=r"save on rank \d: the store of torch.distributed is gone"):
        meet(None, "here", "save", PATIENCE)


def main() -> None:
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    nobody_else_is_there()
    another_rank_waits()
    it_is_gone()
    sys.stdout.write(f"rank {dist.get_rank()} done\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    main()
