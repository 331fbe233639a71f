"""Who has SIGTERM, and how the thread that it wakes comes to its end, whatever other signals are about."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from typing_extensions import override

from ckptlib.policy import stop_signal
from ckptlib.policy.stop_signal import LEFT_ALONE_S, STATUS, StopSignal

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


def watch() -> stop_signal._Watch:
    """The only one, while one is there."""
    found = stop_signal._handler._watch
    assert found is not None
    return found


def test_a_thread_that_a_signal_has_ended_is_not_woken_once_more(
    watched: tuple[StopSignal, threading.Thread],
) -> None:
    stop, thread = watched
    watch()._ended = _Ends(thread)
    os.kill(os.getpid(), signal.SIGTERM)
    stop.remove()
    assert not thread.is_alive()
    assert stop.wanted
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_pipe_that_is_full_of_signals_wakes_as_well(watched: tuple[StopSignal, threading.Thread]) -> None:
    stop, thread = watched
    woken = watch()
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        assert let_go.wait(WAIT_S)

    woken._watch_main = hold  # type: ignore[method-assign]  # as while the main thread goes on for long
    os.kill(os.getpid(), signal.SIGTERM)
    assert held.wait(WAIT_S)
    assert os.write(woken._writes, bytes([signal.SIGALRM]) * PIPE_NBYTES) < PIPE_NBYTES
    with pytest.raises(BlockingIOError):
        os.write(woken._writes, bytes([signal.SIGALRM]))
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


def run(code: str) -> tuple[int, str, str]:
    """What becomes of a program, and both of its outputs."""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * WAIT_S)
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("ends", [StopSignal.remove, lambda stop: stop_signal._handler.forget()], ids=["over", "child"])
def test_a_handler_that_was_installed_later_stays(ends: Callable[[StopSignal], None]) -> None:
    def handler(number: int, frame: object) -> None: ...

    stop = StopSignal(alone=True)
    own = stop_signal.handler()
    before = signal.signal(signal.SIGTERM, handler)
    try:
        ends(stop)
        assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert before == own


def test_a_program_that_handles_the_signal_itself_may_stand_still() -> None:
    code = """if True:
        import os, signal, time
        from ckptlib.policy import stop_signal
        stop_signal.LEFT_ALONE_S = 0.5
        stop, told = stop_signal.StopSignal(), []
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        os.kill(os.getpid(), signal.SIGTERM)
        while not told:
            pass
        time.sleep(4 * stop_signal.LEFT_ALONE_S)
        print(stop.wanted)
    """
    assert run(code) == (0, "False\n", "")


def test_a_handler_that_calls_this_one_leaves_it_the_signal() -> None:
    code = """if True:
        import os, signal, threading
        from ckptlib.policy import stop_signal
        stop_signal.LEFT_ALONE_S = 0.1
        stop = stop_signal.StopSignal()
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: before(number, frame))
        os.kill(os.getpid(), signal.SIGTERM)
        while not stop.wanted:
            pass
        print("told", flush=True)
        threading.Event().wait()
    """
    assert run(code) == (STATUS, "told\n", "")


@pytest.mark.parametrize(
    "end", ["stop.remove(); signal.signal(signal.SIGTERM, before)", "os.kill(os.getpid(), signal.SIGTERM)"]
)
def test_called_by_others_once_it_is_over_it_does_as_by_default(end: str) -> None:
    """Removed, by whoever puts back what was there before, or calls it; and by the second notice."""
    code = f"""if True:
        import os, signal
        from ckptlib.policy import stop_signal
        stop_signal.SAME_NOTICE_S = -1.0
        stop = stop_signal.StopSignal(alone=True)
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda number, frame: before(number, frame))
        {end}
        print("ended", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    """
    assert run(code) == (-signal.SIGTERM, "ended\n", "")


class Stands:
    """A main thread that is always at one place, and a clock that stands still between its steps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.looks, self.left = 0.0, 0, list[int]()
        patch.setattr(stop_signal, "time", self)
        patch.setattr(stop_signal, "_main_place", self.look)
        patch.setattr(os, "_exit", self.left.append)

    def monotonic(self) -> float:
        return self.now

    def look(self) -> tuple[int, int]:
        self.looks += 1
        return 0, 0

    def wait_for_looks(self) -> None:
        """Until the thread has looked once from begin to end."""
        wanted, deadline = self.looks + 2, time.monotonic() + WAIT_S
        while self.looks < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_whoever_does_steps_is_not_left(
    watched: tuple[StopSignal, threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them takes longer than the thread looks, in the same call as the one before."""
    stop, _ = watched
    stands = Stands(monkeypatch)
    signal.raise_signal(signal.SIGTERM)
    stands.wait_for_looks()
    for _ in range(5):
        stands.now += 0.8 * LEFT_ALONE_S
        stop.note_step()
        stands.wait_for_looks()
    assert not stands.left
    stands.now += 1.2 * LEFT_ALONE_S
    stands.wait_for_looks()
    assert stands.left
    stop.remove()


def test_the_thread_watches_nobody_who_handles_the_signal_himself(
    watched: tuple[StopSignal, threading.Thread],
) -> None:
    stop, _ = watched
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        watches = threading.Thread(target=watch()._watch_main, daemon=True)
        watches.start()
        deadline = time.monotonic() + WAIT_S
        while watches.is_alive() and time.monotonic() < deadline:
            stop.note_step()
            time.sleep(0.01)
        assert not watches.is_alive()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_removed_by_another_thread_it_does_not_keep_signals_from_the_next_one() -> None:
    elsewhere(StopSignal().remove)
    stop = StopSignal()
    signal.raise_signal(signal.SIGTERM)
    assert stop.wanted
    stop.remove()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_put_back_when_it_is_over_it_does_not_keep_signals_from_the_next_one() -> None:
    over = StopSignal(alone=True)
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    over.remove()
    signal.signal(signal.SIGTERM, before)
    stop = StopSignal(alone=True)
    assert signal.getsignal(signal.SIGTERM) == stop_signal.handler()
    stop.remove()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# Several in one process


def test_each_that_is_open_notes_a_signal() -> None:
    first, second = StopSignal(alone=True), StopSignal(alone=True)
    signal.raise_signal(signal.SIGTERM)
    assert first.wanted
    assert second.wanted
    third = StopSignal(alone=True)
    first.remove()
    second.remove()
    assert signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL
    signal.raise_signal(signal.SIGUSR1)
    assert third.wanted
    third.remove()
    assert [signal.getsignal(number) for number in stop_signal.TOLD_BY] == [signal.SIG_DFL] * 2


def test_a_dropped_one_keeps_signals_from_nobody() -> None:
    code = """if True:
        import os, signal
        from ckptlib.policy.stop_signal import StopSignal
        dropped, stop = StopSignal(), StopSignal()
        del dropped
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.wanted
        del stop
        print("dropped", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    """
    assert run(code) == (-signal.SIGTERM, "dropped\n", "")


def test_one_that_has_not_been_told_keeps_sigterm_from_killing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one of a training that was told, stopped, and never closed, beside that of the next one."""
    killed: list[int] = []
    monkeypatch.setattr(stop_signal, "_do_as_by_default", killed.append)
    stands = Stands(monkeypatch)
    first = StopSignal(alone=True)
    signal.raise_signal(signal.SIGTERM)
    second = StopSignal(alone=True)
    for _ in range(2):
        stands.now += 1.1 * stop_signal.SAME_NOTICE_S
        assert not killed
        signal.raise_signal(signal.SIGTERM)
    assert killed == [signal.SIGTERM]
    first.remove()
    second.remove()


def test_the_thread_watches_for_all(
    watched: tuple[StopSignal, threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves nobody as long as one of them does steps, waits for a save, or comes to its end."""
    first, thread = watched
    second = StopSignal()
    stands = Stands(monkeypatch)
    signal.raise_signal(signal.SIGTERM)
    stands.wait_for_looks()

    def stand() -> list[int]:
        stands.now += 1.2 * LEFT_ALONE_S
        stands.wait_for_looks()
        return stands.left

    stands.now += 0.8 * LEFT_ALONE_S
    second.note_step()
    stands.wait_for_looks()
    stands.now += 0.8 * LEFT_ALONE_S
    stands.wait_for_looks()
    assert not stands.left, "the second does steps"
    with first.busy():
        assert not stand()
    with stop_signal.waiting(lambda: True):
        with stop_signal.waiting(lambda: True):
            assert not stand()
        assert not stand()
    first.heed()
    assert not stand()
    first.remove()
    assert thread.is_alive()
    with stop_signal.waiting(lambda: False):
        assert stand(), "the second is watched still, and waits for what may never end"
    second.remove()
    thread.join(WAIT_S)
    assert not thread.is_alive()
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
