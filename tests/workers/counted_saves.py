"""Saves to a store that logs every operation: counted_saves.py <directory> <who waits: all, last, nobody> <state: own,
replicated>.

Rank 0 marks in the log where each save begins. `last`: the last rank waits for each commit, and rank 0 computes
meanwhile; `nobody`: who knows of the commit is the store. `own`: nearly all is of one rank alone; `replicated`: all
ranks hold the same, and each writes some of it. Run again, the job restores what is there, and goes on from it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.stores import open_store

STEPS = 5
PATIENCE_S = 120.0


def url_of(directory: Path) -> str:
    """Of a store that is not local, as far as anybody can tell, and whose operations are logged."""
    return f"fault+latency+file://{directory}/root?latency=0.002&bandwidth=1e9&plan={directory}/plan.json"


def mark(directory: Path, what: object) -> None:
    """Between two barriers: no operation of another save lies on the wrong side, since each was waited for."""
    dist.barrier()
    if dist.get_rank() == 0:
        with open(directory / "plan.json.log", "a") as log:
            log.write(json.dumps({"mark": what}) + "\n")
    dist.barrier()


def await_in_store(directory: Path) -> None:
    """By a way that is not logged, and not ckptlib's writer."""
    catalog, deadline = Catalog(open_store(str(directory / "root"))), time.monotonic() + PATIENCE_S
    before = len(catalog.saves())
    while len(catalog.saves()) == before and time.monotonic() < deadline:
        time.sleep(0.01)


def state_of(rank: int, kind: str) -> tuple[dict[str, object], list[torch.Tensor]]:
    """And what of it is trained."""
    if kind == "replicated":
        replicas = [torch.zeros(25_000) for _ in range(8)]
        return {"frozen": [torch.arange(50_000) + i for i in range(8)], "trained": replicas}, replicas
    trained = torch.zeros(100_000)
    own = ckptlib.PerRank({"frozen": torch.arange(200_000) + rank, "trained": trained})
    return {"own": own, "all": torch.ones(9)}, [trained]


def main(directory: Path, waits: str, kind: str) -> None:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    state, trained = state_of(rank, kind)
    with ckptlib.Checkpointer(url_of(directory), state, every=1) as ckpt:
        mark(directory, "restore")
        done = ckpt.restore().step or 0
        for step in range(done + 1, done + 1 + STEPS):
            mark(directory, step)
            for tensor in trained:
                tensor.add_(torch.rand(len(tensor)) + (rank if kind == "own" else 0))
            pending = ckpt.save(step)
            if waits == "all" or (waits == "last" and rank == size - 1):
                pending.wait_committed(PATIENCE_S)
                assert pending.committed
            elif rank == 0 and waits == "nobody":
                await_in_store(directory)
        mark(directory, "end")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
