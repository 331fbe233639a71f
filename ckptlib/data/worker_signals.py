"""Workers of data loaders that a scheduler's warning does not end.

It goes to all processes of a job, and a trainer whose workers die raises before it has saved.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from torch.utils.data import DataLoader

from ckptlib.policy.stop_signal import TOLD_BY

CAN_WAIT = hasattr(signal, "sigwaitinfo")
"""macOS has none."""


def outlast_signals(worker: int) -> None:
    """A `worker_init_fn` for any DataLoader: SIGTERM and SIGUSR1 do not end the worker, but for SIGTERM of the trainer.

    `resumable` gives it to its loader. Both signals are blocked in what the worker starts by `subprocess`.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None and trainer.pid is not None and CAN_WAIT:
        signal.pthread_sigmask(signal.SIG_BLOCK, TOLD_BY)
        threading.Thread(target=_heed, args=(trainer.pid,), name="ckptlib-worker", daemon=True).start()


def _heed(trainer: int) -> None:
    """By a thread, since a handler of Python's is not told who has sent a signal."""
    while True:
        told = signal.sigwaitinfo(TOLD_BY)
        if told.si_signo == signal.SIGTERM and told.si_pid == trainer:
            os._exit(0)  # as torch's own handler does, which gets no signal now


def begin_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """`then`: the user's own `worker_init_fn`."""
    outlast_signals(worker)
    if then is not None:
        then(worker)


@contextmanager
def outlasting(loader: DataLoader[Any]) -> Iterator[None]:
    """Within, workers that `loader` starts outlast the signals, whatever `worker_init_fn` the program has given it.

    A worker that is spawned imports numpy before its `worker_init_fn` runs: numpy's threads have blocked only what was
    blocked before, and one that has not would take the signal, and end the worker.
    """
    given = loader.worker_init_fn
    if not (isinstance(given, partial) and given.func is begin_worker):
        loader.worker_init_fn = partial(begin_worker, given)
    how = (loader.multiprocessing_context or multiprocessing).get_start_method() if loader.num_workers else None
    # A forkserver that starts now would give the mask to all its processes: nobody could end those of others.
    if how not in ("fork", "spawn") or not CAN_WAIT:
        yield
        return
    if how == "spawn":
        resource_tracker.ensure_running()  # workers need it, and it unblocks SIGTERM in this thread as it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TOLD_BY)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
