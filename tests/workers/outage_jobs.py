"""Trainers behind a store with faults of each rank's own: they step on, and tell what becomes of their saves."""

from __future__ import annotations

import time
from typing import Any

from workers.crash_jobs import NUMEL, State, Teller, checkpointer


def step_on(tell: Teller, rank: int, *, url: str, pause_s: float = 0.01, **kwargs: Any) -> None:
    """Until it is told to stop (SIGTERM). `url`: {rank} stands for the rank."""
    state = State(NUMEL)
    with checkpointer(url.replace("{rank}", str(rank)), state, every=3, **kwargs) as ckpt:
        report = ckpt.restore()
        state.check(report.step)
        tell("restored", step=report.step)
        for step in ckpt.loop(report.step, 10**6):
            state.advance()
            tell("step", step=step + 1)
            time.sleep(pause_s)
        tell("stopped", step=step + 1)
    tell("closed")
