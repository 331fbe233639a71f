"""NVRx's restart within the process, with checkpoints by ckptlib, on the CPU.

    torchrun --nproc-per-node 2 examples/nvrx_train.py out 40 --fails-at 25

After an error on a rank, `inprocess.Wrapper` calls `train` again on all of them, in the same processes. It goes on from
the newest step. After a kill of the job, give the command again. Lines that end with `# ckpt` are there for ckptlib.
"""

import argparse
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess

import ckptlib  # ckpt

PATIENCE = timedelta(seconds=20)
"""How long a rank waits in a collective for one that has left. NVRx ends such a wait with NCCL; gloo has no way to."""


def train(given: argparse.Namespace, call: inprocess.CallWrapper = None) -> None:
    base, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1, int(os.environ["RANK"])
    store = dist.TCPStore(base, port, is_master=rank == 0, multi_tenant=True, wait_for_workers=False)
    store = dist.PrefixStore(str(call.iteration), store)  # of this call alone
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), timeout=PATIENCE)
    try:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
        model = torch.nn.parallel.DistributedDataParallel(model)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = {"model": model, "optim": optim}
        with ckptlib.Checkpointer(f"{given.out}/ckptlib", state, every=5, timeout=PATIENCE) as ckpt:  # ckpt
            start = ckpt.restore().step  # ckpt
            print(f"rank {rank}, call {call.iteration}: from step {start}", flush=True)
            for step in ckpt.loop(start, given.steps):  # ckpt
                model(torch.randn(32, 16)).square().mean().backward()
                optim.step()
                optim.zero_grad()
                call.ping()
                if given.fails_at == step and call.iteration == 0 and rank == 1:
                    raise RuntimeError("as asked")
        if rank == 0:
            torch.save(model.module.state_dict(), Path(given.out, "final.pt"))
        dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("steps", type=int)
    parser.add_argument("--fails-at", type=int)
    given = parser.parse_args()
    wrapper = inprocess.Wrapper(
        store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 2, "timeout": timedelta(seconds=120)},
        abort=None,  # NVRx's own is for NCCL
    )
    wrapper(train)(given)


if __name__ == "__main__":
    main()
