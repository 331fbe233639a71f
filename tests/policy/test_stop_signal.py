"""How the thread that SIGTERM wakes comes to its end, whatever other signals are about."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from typing_extensions import override

from ckptlib.policy.stop_signal import StopSignal

WAIT_S = 30.0
PIPE_NBYTES = 1 << 20
"""More than a pipe holds."""


class _Ends(threading.Event):
    """Set by whoever ends the thread: returns when that has ended, so that it is gone before anything else is done."""

    @override
    def set(self) -> None:
        super().set()
        _thread().join(WAIT_S)


def _thread() -> threading.Thread:
    (found,) = (thread for thread in threading.enumerate() if thread.name == "ckptlib-stop")
    return found


@pytest.fixture
def stop() -> StopSignal:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return StopSignal()


def test_a_thread_that_a_signal_has_ended_is_not_woken_once_more(stop: StopSignal) -> None:
    assert stop._watch is not None
    thread, stop._watch.heeded = _thread(), _Ends()
    os.kill(os.getpid(), signal.SIGTERM)
    stop.remove()
    assert not thread.is_alive()
    assert stop.wanted
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_pipe_that_is_full_of_signals_wakes_as_well(stop: StopSignal) -> None:
    watch, thread = stop._watch, _thread()
    assert watch is not None
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert let_go.wait(WAIT_S)

    watch._watch_main = hold  # type: ignore[method-assign]  # as while the main thread goes on for long
    os.kill(os.getpid(), signal.SIGTERM)
    assert held.wait(WAIT_S)
    assert os.write(watch._writes, bytes([signal.SIGALRM]) * PIPE_NBYTES) < PIPE_NBYTES
    with pytest.raises(BlockingIOError):
        os.write(watch._writes, bytes([signal.SIGALRM]))
    stop.remove()
    let_go.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()
