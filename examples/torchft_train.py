"""torchft with checkpoints by ckptlib, on the CPU: live recovery within the job by torchft, after its end by ckptlib.

    torchft_lighthouse --min_replicas 2 --bind 127.0.0.1:29510 &
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python examples/torchft_train.py out 40 --group 0 &
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python examples/torchft_train.py out 40 --group 1

Each process is a replica group of one rank. Group 0 saves. Kill both, start them again: group 0 goes on from the newest
step, and the others get its live weights from torchft. Lines that end with `# ckpt` are there for ckptlib only.
"""

import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

import ckptlib  # ckpt


def train(given: argparse.Namespace) -> None:
    torch.manual_seed(given.group)  # other weights at first: torchft gives all the same
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load(live: dict) -> None:
        model.load_state_dict(live["model"])
        optim.load_state_dict(live["optim"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optim": optim.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"group{given.group}",
    )
    state = {"model": model, "optim": optim, "torchft": manager}  # ckpt: the manager has the count of steps
    saves = None  # ckpt
    if given.group == 0:  # ckpt: a root has one job that saves
        saves = ckptlib.Checkpointer(f"{given.out}/ckptlib", state, every=5)  # ckpt
        print("from step", saves.restore().step, flush=True)  # ckpt
        saves.restore_random()  # ckpt
    replicated, steps = DistributedDataParallel(manager, model), Optimizer(manager, optim)
    while manager.current_step() < given.steps:
        before = manager.current_step()  # ckpt
        steps.zero_grad()  # begins a quorum, in which weights are recovered
        seed = 1000 * manager.current_step() + manager.participating_rank()
        batch = torch.randn(32, 16, generator=torch.Generator().manual_seed(seed))
        replicated(batch).square().mean().backward()
        steps.step()
        if saves is not None and manager.current_step() > before:  # ckpt: a step that was discarded changed nothing
            saves.after_step(manager.current_step())  # ckpt
            if saves.stopping:  # ckpt: it was told to, as by SIGTERM, and has saved this step
                saves.close()  # ckpt
                manager.shutdown(wait=False)  # ckpt
                raise ckptlib.Preempted  # ckpt
    if saves is not None:  # ckpt
        saves.save(manager.current_step())  # ckpt
        saves.close()  # ckpt
    torch.save(model.state_dict(), Path(given.out, f"final-{given.group}.pt"))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("steps", type=int)
    parser.add_argument("--group", type=int, default=0)
    train(parser.parse_args())
