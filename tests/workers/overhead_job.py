"""Two ranks that keep to an overhead; run by torchrun: overhead_job.py <directory> <case>.

Each tells, as JSON: of each step the interval in force, the newest save and snapshot, and what its own tuner needed
after it.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ckptlib
from ckptlib.events import Begun, Event

STEPS = 120
PREEMPTED = 70


def main(directory: Path, case: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    budget = (0.9, 0.04)[rank] if case == "different" else 0.3
    bounds = {"at_most_lost": timedelta(seconds=0.001)} if case == "bounded" and rank == 0 else {}
    every = ckptlib.Overhead(budget, **bounds)
    options = {}
    if case in ("peers", "memory"):
        often = 2 if case == "peers" else ckptlib.Overhead(0.9)
        options = {"peers": ckptlib.Peers(copies=1, every=often, domain=f"host{rank}")}
    if case == "memory":
        every = ckptlib.Steps(50)
    if case == "combined" and rank == 0:
        every |= ckptlib.First() | ckptlib.Steps(50)
    told: list[dict[str, int | None]] = []
    state = {"model": model, "optim": optimizer}
    begun: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, Begun):
            begun.append(event.step)

    kept = ckptlib.Checkpointer(str(directory / "root"), state, every=every, on_event=note, **options)
    with suppress(ckptlib.Preempted), kept as ckpt:
        start = ckpt.restore().step
        for step in ckpt.loop(start, start + STEPS):
            if step > start:
                told.append(said(ckpt, step, begun))
            if case in ("slow", "memory") and rank == 1:
                time.sleep(0.005)
            if case == "preempted" and rank == 1 and step == PREEMPTED:
                os.kill(os.getpid(), signal.SIGTERM)
            model(torch.randn(8, 64)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        last = ckpt.pending.step
    (directory / f"{case}.rank{rank}").write_text(json.dumps({"start": start, "last": last, "steps": told}))
    dist.destroy_process_group()


def said(ckpt: ckptlib.Checkpointer, step: int, begun: list[int]) -> dict[str, int | None]:
    """After `step` steps."""
    kinds = ckpt._turns.tuning._kinds
    kind = kinds.store if ckpt.memory_interval is None else kinds.memory
    pending = ckpt.pending
    return {
        "step": step,
        "interval": ckpt.interval if ckpt.memory_interval is None else ckpt.memory_interval,
        "saved": None if pending is None else pending.step,
        "snapped": begun[-1] if begun else None,
        "needed": None if kind is None or kind.account is None else kind.account.tuner.interval,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
