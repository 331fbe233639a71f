"""Workers of data loaders that a scheduler's warning does not end.

It goes to all processes of a job, and a trainer whose workers die raises before it has saved.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.utils.data import DataLoader

from ckptlib.policy.stop_signal import TOLD_BY

GRACE_S = 60.0
"""From the first SIGTERM to a worker until it ends. It may be a trainer at its exit that sent it, and now waits for the
end: a handler is not told who sends."""

_held: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""Data loaders, and iterators of these, that may have workers, and the process that made each."""


def outlast_signals(worker: int) -> None:
    """A `worker_init_fn` for any DataLoader: the first SIGTERM, and each SIGUSR1, leaves the worker alone.

    A second SIGTERM ends it, and so does a minute after the first. `resumable` gives it to its loader.
    """
    if multiprocessing.parent_process() is not None:
        for number in TOLD_BY:  # by handlers: what the worker starts by `subprocess` has none, and no signal blocked
            signal.signal(number, _end_later if number == signal.SIGTERM else _pass)


def _pass(number: int, frame: object) -> None:
    pass


def _end_later(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, _end)
    timer = threading.Timer(GRACE_S, os._exit, (0,))
    timer.daemon = True
    timer.start()


def _end(number: int, frame: object) -> None:
    os._exit(0)  # as torch's own handler does, which is not in place any more


def begin_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """`then`: the user's own `worker_init_fn`."""
    outlast_signals(worker)
    if then is not None:
        then(worker)


def outlasting(loader: DataLoader[Any]) -> None:
    """The workers that `loader` starts outlast the signals, whatever `worker_init_fn` the program gave it."""
    given = loader.worker_init_fn
    if not (isinstance(given, partial) and given.func is begin_worker):
        loader.worker_init_fn = partial(begin_worker, given)
    if loader not in _held:
        _end_at_exit(loader)  # which holds an iterator where workers are persistent


def begun(loader: DataLoader[Any]) -> Any:
    """An iterator of `loader` whose workers outlast the signals."""
    outlasting(loader)
    batches = iter(loader)
    if batches not in _held:
        _end_at_exit(batches)
    return batches


def _end_at_exit(holder: Any) -> None:
    _held[holder] = os.getpid()
    # Where multiprocessing has started the trainer as well: that runs this at its end, and no atexit. The queues by
    # which workers are told to end close with priority 10.
    Finalize(holder, _end_workers, (ref(holder),), exitpriority=20)


def _end_workers(of: ref[Any]) -> None:
    holder = of()
    if holder is not None and _held.get(holder) == os.getpid():
        for batches in (holder, getattr(holder, "_iterator", None)):
            end = getattr(batches, "_shutdown_workers", None)  # what its __del__ does, which is not called at an exit
            if end is not None:
                end()


@atexit.register  # behind multiprocessing's own, so it runs before that sends its SIGTERM, and waits for each worker
def _let_go() -> None:
    for holder in list(_held):
        _end_workers(ref(holder))
