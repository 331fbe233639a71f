"""One of two ranks, whose writer still reads a slot when rank 0 has told that the save failed: <root> <plan>.

Says "rank <n> done" at its end.
"""

from __future__ import annotations

import sys
import threading

import pytest
import torch
import torch.distributed as dist

import ckptlib
from ckptlib.testing import write_plan

SAVES = 6
"""More than there are slots."""


def main() -> None:
    root, plan = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {"own": ckptlib.PerRank(torch.zeros(100_000))}
    with ckptlib.Checkpointer(f"fault+file://{root}?plan={plan}", state, every=10**9) as ckpt:
        ckpt.save(1).wait_committed()
        dist.barrier()
        if rank == 0:
            fails = {"op": "commit", "key": "^packs/.*/000000-", "action": "full"}
            write_plan(plan, [fails, {"op": "commit", "key": "^packs/.*/000001-", "action": "hold"}])
        dist.barrier()
        for step in range(2, 2 + SAVES):
            state["own"].value.fill_(step)
            pending = ckpt.save(step)
            if step == 2:
                with pytest.raises(ckptlib.SaveFailed):
                    pending.wait_committed()
                if rank == 0:
                    threading.Timer(2.0, write_plan, (plan, [])).start()
        pending.wait_committed()
    print(f"rank {rank} done", flush=True)


if __name__ == "__main__":
    main()
