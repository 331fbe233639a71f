"""Threads beside the one that trains: they may wait for a save, and may not save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from helpers.inside import session_of, writer_of
from helpers.one_job import WAIT_S
from helpers.writers import stop

import ckptlib
from ckptlib.errors import WaitTimeout


def test_a_thread_waits_for_a_save_while_the_training_goes_on(tmp_path: Path) -> None:
    """It listens to the writer all the time, and what it hears frees the slots of the next save."""
    with ckptlib.Checkpointer(tmp_path, {"w": torch.ones(100)}, every=1) as ckpt, ThreadPoolExecutor(4) as threads:
        ckpt.restore()
        waiting = []
        for step in range(1, 300):
            ckpt.after_step(step)
            if ckpt.pending is not None and (not waiting or waiting[-1][0] is not ckpt.pending):
                waiting.append((ckpt.pending, threads.submit(ckpt.pending.result, WAIT_S)))
        for pending, told in waiting:
            assert told.result() == pending.step
        assert not session_of(ckpt).snapshots.persisting
    assert {pending.step for pending, _ in waiting} == {info.step for info in ckptlib.checkpoints(tmp_path)}


def test_a_thread_that_waits_for_a_store_that_hangs_does_not_hold_up_the_training(tmp_path: Path) -> None:
    with ckptlib.Checkpointer(tmp_path, {"w": torch.ones(100)}, every=10**6) as ckpt, ThreadPoolExecutor(1) as threads:
        stop(writer_of(ckpt).pid)
        pending = ckpt.save(1)
        told = threads.submit(pending.result, WAIT_S)
        for step in range(2, 50):
            ckpt.after_step(step)
        with pytest.raises(WaitTimeout):
            pending.wait_committed(0.1)
        assert not told.done()

        os.kill(writer_of(ckpt).pid, signal.SIGCONT)
        assert told.result() == 1


class _AskedByAnother(ckptlib.Policy):
    """Asked within `after_step`, when a save has been taken and its copy has yet to be let go: another thread has just
    seen that save, and waits for it."""

    def __init__(self) -> None:
        self.pending: Callable[[], ckptlib.Pending | None] = lambda: None
        self.threads = ThreadPoolExecutor(1)
        self.told: Future[int] | None = None

    def due(self, step: int) -> bool:
        pending = self.pending()
        if pending is not None and self.told is None:
            self.told = self.threads.submit(pending.result, WAIT_S)
            wait([self.told], 0.5)  # where it can, it ends the save at once
        return step == 2


def test_a_thread_that_waits_for_a_save_that_just_begins_does_not_end_it(tmp_path: Path) -> None:
    policy = _AskedByAnother()
    with ckptlib.Checkpointer(tmp_path, {"w": torch.ones(100)}, every=policy) as ckpt, policy.threads:
        policy.pending = lambda: ckpt.pending
        for step in range(1, 5):
            ckpt.after_step(step)
        assert policy.told is not None
        assert policy.told.result() == 2
    assert [info.step for info in ckptlib.checkpoints(tmp_path)] == [2]


class _Slow:
    """An object whose state is not given before it may be."""

    def __init__(self) -> None:
        self.asked, self.may = threading.Event(), threading.Event()
        self.may.set()

    def state_dict(self) -> dict[str, int]:
        self.asked.set()
        assert self.may.wait(WAIT_S)
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def test_two_threads_that_save_at_once_are_told(tmp_path: Path) -> None:
    slow = _Slow()
    with ckptlib.Checkpointer(tmp_path, {"slow": slow}, every=10**6) as ckpt, ThreadPoolExecutor(1) as threads:
        slow.asked.clear()
        slow.may.clear()
        first = threads.submit(ckpt.save, 1)
        assert slow.asked.wait(WAIT_S)
        with pytest.raises(ValueError, match="two threads are in `after_step` or `save` of one Checkpointer at once"):
            ckpt.after_step(1)
        with pytest.raises(ValueError, match="Other threads may wait for a save"):
            ckpt.save(2)
        slow.may.set()
        first.result().wait_committed(WAIT_S)
        ckpt.save(2).wait_committed(WAIT_S)
    assert [info.step for info in ckptlib.checkpoints(tmp_path)] == [1, 2]
