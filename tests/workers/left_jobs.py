"""A trainer that dies while its writer has orders to read."""

from __future__ import annotations

import os
import signal
from typing import Any

from helpers.inside import writer_of
from helpers.writers import stop
from workers.crash_jobs import NUMEL, WAIT_S, State, Teller, checkpointer, take


def die_early(tell: Teller, rank: int, *, url: str, stopped: bool, **kwargs: Any) -> None:
    """SIGKILL behind the next step's snapshot, which the writer was told to persist. `stopped`: the writer, before it
    could read any such order."""
    state = State(NUMEL)
    with checkpointer(url, state, **kwargs) as ckpt:
        writer = writer_of(ckpt).pid
        if stopped:
            stop(writer)
        step = ckpt.restore().step + 1
        state.advance()
        take(ckpt, state, step).wait_staged(WAIT_S)
        tell("dies", step=step, writer=writer)
        os.kill(os.getpid(), signal.SIGKILL)
