"""The signal by which a job is told to stop."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from types import FrameType


class StopSignal:
    """Notes SIGTERM, where nobody else handles it; the second one kills as ever."""

    def __init__(self) -> None:
        self.wanted = False
        self._installed = False
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._installed = True
            _installed.add(self)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self.remove()

    def remove(self) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._installed = False


_installed: weakref.WeakSet[StopSignal] = weakref.WeakSet()

_masked = threading.local()
"""The forking thread's mask, while there is a fork under way."""


def _before_fork() -> None:
    """A signal to the child that came before its handler is gone would be swallowed."""
    _masked.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if _installed else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masked.before)


def _in_child() -> None:
    """A forked worker is ended by the first SIGTERM: its pool sends one and waits."""
    for stop in list(_installed):
        stop.remove()
    _after_fork()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
