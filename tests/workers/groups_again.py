"""One of two ranks that survive their process group and make another. Says "rank <n> done" at its end."""

from __future__ import annotations

import os
import time
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


def wait_for_rank_1(store: dist.Store, seen: bytes) -> None:
    """Rank 0 offers another name when rank 1 has looked at the last one; or, since it may take that, in a second."""
    deadline = time.monotonic() + 1.0
    while store.get("came/1") == seen and time.monotonic() < deadline:
        time.sleep(0.01)


def remove_keys_of_torch(whole: dist.Store) -> None:
    """Where gloo listens: ranks that begin again at once would take the last address of one that is later for its new
    one, and be refused. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        for key in whole.list_keys():
            if "ckptlib/" not in key:
                whole.delete_key(key)
    dist.barrier()


def in_the_same_store() -> None:
    """Whose keys are there from the last time: all but torch's own."""
    for call in range(3):
        dist.init_process_group("gloo", timeout=PATIENCE)
        whole = dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"ckptlib/{dist.group.WORLD.group_name}", whole)
        seen = store.get("came/1") if call else b""
        dist.barrier()
        if call and dist.get_rank() == 0:
            wait_for_rank_1(store, seen)
        come_together()
        remove_keys_of_torch(whole)
        dist.destroy_process_group()


def main() -> None:
    in_the_same_store()
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
