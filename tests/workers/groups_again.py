"""One of two ranks that survive their process group and make another. Says "rank <n> done" at its end."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch.distributed as dist

from ckptlib.errors import AgreementFailed
from ckptlib.ranks.meeting import group_of, meet

PATIENCE = timedelta(seconds=20)
SHORT = timedelta(seconds=0.3)


def init(call: str) -> None:
    """A process group of this call alone, as a restart within the process makes it."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore(call, store), rank=rank, world_size=size, timeout=PATIENCE)


def come_together() -> None:
    group = group_of(None, PATIENCE)
    assert group.max([group.rank]) == [1]
    meet(None, "here", "save(step=1)", PATIENCE)
    group.close()


def come_alone() -> None:
    with pytest.raises(AgreementFailed):
        group_of(None, SHORT)
    with pytest.raises(AgreementFailed):
        meet(None, "here", "save(step=2)", SHORT)


def main() -> None:
    init("first")
    rank = dist.get_rank()
    come_together()
    if rank == 0:
        come_alone()
    dist.barrier()
    dist.destroy_process_group()
    init("second")
    come_together()
    print(f"rank {rank} done", flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    main()
