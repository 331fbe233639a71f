"""A training that is killed at any time, and keeps its own log of when it did what. It shares no code with ckptlib."""

from __future__ import annotations

import time
from pathlib import Path

import torch

STEP_S = 0.03


def train(url: str, arena: str, log: str, steps: int, every: int, result: str) -> None:
    """To the end; then the weights go to `result`."""
    import ckptlib

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with open(log, "a", buffering=1, encoding="ascii") as lines:

        def tell(what: str, step: int = 0) -> None:
            lines.write(f"{what} {step} {time.time():.6f}\n")

        tell("begins")
        with ckptlib.Checkpointer(url, {"model": model, "optim": optimizer}, every=every, arena=arena) as ckpt:
            start = ckpt.restore().step
            tell("restored", start)
            for step in ckpt.loop(start, steps):
                tell("step", step)
                model(torch.randn(4, 8)).square().mean().backward()
                time.sleep(STEP_S)
                optimizer.step()
                optimizer.zero_grad()
            tell("step", steps)
        tell("ended", steps)
    torch.save([p.detach() for p in model.parameters()], Path(result))
