"""One of two ranks, the second of which cannot even put into the store that its share failed: <root> <plan>.

Says "rank <n> done" at its end.
"""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import torch.distributed as dist
from workers.no_threads import NO_STACK

import ckptlib
from ckptlib.saving import news
from ckptlib.saving.registry import registry
from ckptlib.testing import write_plan

news.GIVEN_UP_EVERY_S = 0.05


def refuse(plan: str, action: str) -> None:
    """Has all that rank 1 puts answered so."""
    write_plan(plan, [{"op": op, "key": "^pa.*/000001-", "action": action} for op in ("put", "commit")])


def main() -> None:
    root, plan = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {"own": ckptlib.PerRank(torch.zeros(100_000))}
    url = f"fault+file://{root}?plan={plan}"
    with ckptlib.Checkpointer(url, state, every=10**9) as ckpt:
        if rank == 0:
            refuse(plan, "error")
        dist.barrier()
        pending = ckpt.save(1)
        with pytest.raises(ckptlib.SaveFailed, match=r"never be committed.*/000001-.*an error, as planned"):
            pending.wait_committed()
        dist.barrier()
        if rank == 0:
            write_plan(plan, [])
        dist.barrier()
        ckpt.save(2)
    if rank == 0:
        refuse(plan, "denied")
    dist.barrier()
    pending = ckptlib.save_async(url, state, 3)
    pending.wait_staged()
    threading.stack_size(NO_STACK)  # from 3.12 on, Python starts no thread as a program ends
    registry.close()  # as it ends, where nobody waits for a save; rank 0 waited for an hour
    assert "/000001-" in str(pending.error)
    print(f"rank {rank} done", flush=True)


if __name__ == "__main__":
    main()
