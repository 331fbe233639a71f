"""Workers of data loaders that a scheduler's warning does not end.

It goes to all processes of a job, and a trainer whose workers die raises before it has saved.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable

from ckptlib.policy.stop_signal import TOLD_BY


def outlast_signals(worker: int) -> None:
    """A `worker_init_fn` for any DataLoader: SIGTERM and SIGUSR1 do not end the worker, but for SIGTERM of the trainer.

    `resumable` gives it to its loader. Both signals are blocked in what the worker starts by `subprocess`.
    """
    trainer = multiprocessing.parent_process()
    if trainer is not None and trainer.pid is not None and hasattr(signal, "sigwaitinfo"):  # macOS has none
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
