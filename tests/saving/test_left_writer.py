"""A writer that its job left behind before it had put the record of its generation, and the job that comes next."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from helpers.writers import alive, until

import ckptlib


def test_the_record_comes_after_the_next_job_has_begun(tmp_path: Path) -> None:
    """Its snapshot was in memory only, so nothing that it puts takes the root from the job that runs."""
    state = {"w": torch.ones(100)}
    ckptlib.save(tmp_path, state, 0)
    writer = None
    try:
        try:
            with ckptlib.Checkpointer(tmp_path, state, every=1, peers=ckptlib.Peers(copies=0)) as first:
                writer = first._session.writer.pid
                os.kill(writer, signal.SIGSTOP)
                first.after_step(1)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        with ckptlib.Checkpointer(tmp_path, state, every=10**6, peers=ckptlib.Peers(copies=0)) as second:
            assert second._session.generation.number > first._session.generation.number
            os.kill(writer, signal.SIGCONT)
            until((tmp_path / first._session.generation.key).exists)
            second.save(10).wait_committed(60.0)
    finally:
        if writer is not None and alive(writer):
            os.kill(writer, signal.SIGKILL)
