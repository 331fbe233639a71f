"""One start of a run with a history: it trains up to a step and ends there, is killed, or is lost with its host."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch

STEP_S = 0.02
FROZEN = 1 << 18
"""Elements of a table that no step changes: 1 MiB, which later saves take over."""


def train(url: str, arena: str, last: int, every: int | None, end: str) -> None:
    """`end`: closed, killed (the trainer) or lost (its writer, too, at the same moment). `every`: None for Overhead."""
    import ckptlib

    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = torch.randn(FROZEN)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"table": table, "model": model, "optim": optimizer}
    when = ckptlib.Overhead(at_most=0.2) if every is None else every
    with ckptlib.Checkpointer(
        url, state, every=when, arena=arena, codec="planes", tags={"name": "a <b>run</b>"}
    ) as ckpt:
        for step in ckpt.loop(ckpt.restore().step, last):
            if every is not None and step % every == 0 and ckpt.pending is not None:
                with suppress(ckptlib.SaveFailed):
                    ckpt.pending.wait_committed()  # so that each is saved, and none is late
            loss = model(torch.randn(4, 256)).square().mean()
            loss.backward()
            time.sleep(STEP_S)
            optimizer.step()
            optimizer.zero_grad()
            ckpt.log({"loss": loss.item()})
            if step == last - 1 and end != "closed":
                _die(with_writer=end == "lost")


def _die(with_writer: bool) -> None:
    for child in _children() if with_writer else ():
        os.kill(child, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = path.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(after_name[1]) == os.getpid():
            found.append(int(path.parent.name))
    return found
