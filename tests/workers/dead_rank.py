"""Two ranks save; one dies before its part is there: dead_rank.py <root> <plan>. Rank 0 prints what it was told."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from workers.crash_oracle import writers_of

import ckptlib
from ckptlib.errors import AgreementFailed
from ckptlib.stores.testing import write_plan

root, plan = sys.argv[1:]
dist.init_process_group("gloo")
url, state = f"fault+file://{root}?plan={plan}", {"w": ckptlib.PerRank(torch.ones(1000))}
ckptlib.save(url, state, 1)
if dist.get_rank() == 1:
    write_plan(plan, [{"op": "put", "key": "^parts/.*/000001-", "action": "stall", "seconds": 600}])
    dist.barrier()
    ckptlib.save_async(url, state, 2)
    for pid in writers_of(os.getpid()):
        os.kill(pid, signal.SIGKILL)
    os._exit(0)
dist.barrier()
try:
    ckptlib.save(url, state, 2)
except AgreementFailed as error:
    print("told:", error, flush=True)
print("steps:", [info.step for info in ckptlib.checkpoints(root)], flush=True)
os._exit(0)
