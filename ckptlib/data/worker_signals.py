"""Lets workers of data loaders outlast a scheduler's warning.

The warning goes to all processes of a job, and a trainer whose workers die raises before it has saved.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from ckptlib.policy.stop_signal import SAME_NOTICE_S, TOLD_BY

GRACE_S = 600.0
"""Seconds from a worker's first SIGTERM until it ends. A trainer that is warned minutes ahead needs batches until it
has saved. But the trainer itself may have sent the signal, to a worker that hangs: a handler is not told who sends."""

NAME = "ckptlib_worker"
"""The worker process's name, as `ps` shows it. The trainer knows its workers by this."""

PR_SET_NAME = 15
"""The option of Linux's prctl."""

PRELOADED = "ckptlib.policy.forkserver"


def outlast_signals(worker: int) -> None:
    """A `worker_init_fn` for any DataLoader: SIGTERM and SIGUSR1 leave the worker alone.

    A worker ends ten minutes after its first SIGTERM, or with another one that comes at least ten seconds after the
    first. The trainer kills it when it exits, and finds it by its process name: do not rename it after this.
    `resumable` gives this to its loader.
    """
    if multiprocessing.parent_process() is not None and _has_taken_name():
        for number in TOLD_BY:  # by handlers: processes that the worker starts inherit none, nor a blocked signal
            signal.signal(number, _end_later if number == signal.SIGTERM else _pass)


def _has_taken_name() -> bool:
    """Renames the process, and returns whether that worked. Only Linux has the call; elsewhere torch's handler stays,
    since an exit would wait for GRACE_S."""
    libc = ctypes.CDLL(None)
    return hasattr(libc, "prctl") and libc.prctl(PR_SET_NAME, NAME.encode()) == 0


def _pass(number: int, frame: object) -> None:
    pass


def _end_later(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, partial(_end, time.monotonic() + SAME_NOTICE_S))
    timer = threading.Timer(GRACE_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _end(not_before: float, number: int, frame: object) -> None:
    """Ends the worker, unless this signal comes so early that it is the same notice: torchrun passes it on to the
    process groups of its ranks, and a scheduler that signals all processes has told their workers itself."""
    if time.monotonic() >= not_before:
        os._exit(0)  # as torch's own handler does, which is no longer installed


def begin_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """Begins a worker that outlasts the signals. `then`: the user's own `worker_init_fn`."""
    outlast_signals(worker)
    if then is not None:
        then(worker)
        _has_taken_name()  # again, since `then` may have given another one, as by setproctitle


def outlasting(loader: DataLoader[Any]) -> None:
    """Makes the workers that `loader` starts outlast the signals, whatever `worker_init_fn` the program gave it."""
    have_forkserver_outlast()
    given = loader.worker_init_fn
    if not (isinstance(given, partial) and given.func is begin_worker):
        loader.worker_init_fn = partial(begin_worker, given)


def have_forkserver_outlast() -> None:
    """Makes the fork server outlast the signals, unless it has begun: workers are its children, and end with it. It is
    the default from Python 3.14 on."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return
    from multiprocessing.forkserver import _forkserver

    imports: list[str] | None = vars(_forkserver).get("_preload_modules")  # the public function can only replace them
    if imports is not None and PRELOADED not in imports:
        multiprocessing.set_forkserver_preload([*imports, PRELOADED])


def begun(loader: DataLoader[Any]) -> Iterator[Any]:
    """Returns an iterator of `loader` whose workers outlast the signals."""
    outlasting(loader)
    return iter(loader)


def _kill_workers() -> None:
    """Kills the workers. multiprocessing would send them SIGTERM, as a scheduler does, and wait for their ends. Torch's
    own workers end by it wherever they are, even if they hang."""
    workers = [child for child in multiprocessing.active_children() if _outlasts(child)]
    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a worker was killed
    for worker in workers:
        worker.kill()


def _outlasts(child: BaseProcess) -> bool:
    try:
        return Path(f"/proc/{child.pid}/comm").read_text().strip() == NAME
    except OSError:  # it has ended
        return False


def _kill_at_end(_: object) -> None:
    """Has this process kill its workers as multiprocessing's own exit begins. A trainer that multiprocessing started
    has that exit, too, in place of atexit."""
    Finalize(None, _kill_workers, exitpriority=20)


_kill_at_end(None)
have_forkserver_outlast()  # before a loader with plain `outlast_signals` starts the fork server
register_after_fork(_kill_at_end, _kill_at_end)  # a child of multiprocessing begins without its parent's
