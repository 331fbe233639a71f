"""How the thread that SIGTERM wakes comes to its end, whatever other signals are about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from typing_extensions import override

from ckptlib.policy.stop_signal import StopSignal

WAIT_S = 30.0
PIPE_NBYTES = 1 << 20
"""More than a pipe holds."""


class _Ends(threading.Event):
    """Set by whoever ends the thread: returns when that has ended, so that it is gone before anything else is done."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__()
        self._thread = thread

    @override
    def set(self) -> None:
        super().set()
        self._thread.join(WAIT_S)


@pytest.fixture
def watched() -> Iterator[tuple[StopSignal, threading.Thread]]:
    """With the thread that it began: one of a test before this may not have come to its end."""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    before = set(threading.enumerate())
    stop = StopSignal()
    (thread,) = (one for one in set(threading.enumerate()) - before if one.name == "ckptlib-stop")
    yield stop, thread
    stop.remove()


def test_a_thread_that_a_signal_has_ended_is_not_woken_once_more(
    watched: tuple[StopSignal, threading.Thread],
) -> None:
    stop, thread = watched
    assert stop._watch is not None
    stop._watch.heeded = _Ends(thread)
    os.kill(os.getpid(), signal.SIGTERM)
    stop.remove()
    assert not thread.is_alive()
    assert stop.wanted
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_pipe_that_is_full_of_signals_wakes_as_well(watched: tuple[StopSignal, threading.Thread]) -> None:
    stop, thread = watched
    watch = stop._watch
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


def elsewhere(call: Callable[[], object]) -> None:
    """In a thread that may change no handler of signals."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result(WAIT_S)


@pytest.mark.parametrize("alone", [True, False])
def test_removed_by_another_thread_the_next_signal_does_as_by_default(alone: bool) -> None:
    code = """if True:
        import os, signal, sys, threading
        from ckptlib.policy.stop_signal import StopSignal
        stop = StopSignal(alone=sys.argv[1] == "True")
        thread = threading.Thread(target=stop.remove)
        thread.start()
        thread.join()
        print("removed", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()
    """
    ended = subprocess.run([sys.executable, "-c", code, str(alone)], capture_output=True, text=True, timeout=2 * WAIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGTERM, "removed\n", "")


def test_removed_by_another_thread_it_does_not_keep_signals_from_the_next_one() -> None:
    elsewhere(StopSignal().remove)
    stop = StopSignal()
    signal.raise_signal(signal.SIGTERM)
    assert stop.wanted
    stop.remove()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_interrupted_as_the_thread_is_to_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(KeyboardInterrupt):
        StopSignal()
    assert signal.set_wakeup_fd(-1) == -1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 1, "the thread's end may be open: it might have begun"
