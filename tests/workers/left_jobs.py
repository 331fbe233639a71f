"""Trainers that leave something to their writers: orders that are not read, or a snapshot that is in memory only."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from helpers.inside import session_of, writer_of
from helpers.writers import stop
from workers.crash_jobs import NUMEL, POLL_S, WAIT_S, State, Teller, checkpointer, settle, take

from ckptlib.checkpoint import SaveOrder, save_step
from ckptlib.staging.stager import Stager


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


def die_held(tell: Teller, rank: int, *, url: str, steps: int, **kwargs: Any) -> None:
    """SIGKILL as soon as it is known that the snapshot of the last of these steps is held."""
    state = State(NUMEL)
    with checkpointer(url, state, every=10**6, **kwargs) as ckpt:
        step = ckpt.restore().step
        while ckpt.coverage is None or (ckpt.coverage.step or 0) < steps:
            if step < steps:
                state.advance()
            step += 1
            ckpt.after_step(step)
            time.sleep(POLL_S)
        tell("dies", writer=writer_of(ckpt).pid, held=ckpt.coverage.step)
        os.kill(os.getpid(), signal.SIGKILL)


def die_restored(tell: Teller, rank: int, *, url: str, **kwargs: Any) -> None:
    """SIGKILL when it has restored from memory, and its record is in the store, but no snapshot of its own."""
    state = State(NUMEL)
    with checkpointer(url, state, every=10**6, **kwargs) as ckpt:
        record = Path(url) / ckpt._session.generation.key

        def die(*given: object) -> None:
            end = time.monotonic() + WAIT_S
            while not record.exists() and time.monotonic() < end:
                time.sleep(POLL_S)
            step = state.diary.step
            state.check(step)
            tell("dies", step=step, recorded=record.exists())
            os.kill(os.getpid(), signal.SIGKILL)

        Stager.begin = die  # type: ignore[assignment, method-assign]
        ckpt.restore()


def die_with_stopped_writers(tell: Teller, rank: int, *, url: str, drains: bool, **kwargs: Any) -> None:
    """Step 1 is committed; SIGKILL when all ranks have step 2 in memory, of which no writer has read. `drains`: whether
    that is to go to the store."""
    state = State(NUMEL)
    with checkpointer(url, state, **kwargs) as ckpt:
        ckpt.restore()
        state.advance()
        settle(tell, take(ckpt, state, 1))
        stop(writer_of(ckpt).pid)
        state.advance()
        pending = save_step(session_of(ckpt), SaveOrder(state.mapping, 2, drains=drains))
        pending.staging.go()
        pending.wait_staged(WAIT_S)
        tell("dies", writer=writer_of(ckpt).pid)
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
