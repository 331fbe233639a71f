"""The signals that tell a job to stop: SIGTERM, and SIGUSR1 of schedulers that warn first."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import cast

TOLD_BY = (signal.SIGTERM, signal.SIGUSR1)

LEFT_ALONE_S = 2.0
"""The process does not leave a training that stands still for less than this, or than twice its longest recent step.

A rank may be late by a second or two when all are told to stop: it waits for data, or its host is busy. The others wait
for it in a collective, and a rank that leaves there takes the last save of the job with it. If one rank is dead, which
is far more frequent, the restart comes later by this time. So this time is not longer.
"""

LOOK_EVERY_S = 0.02

RECENT = 10
"""Number of steps."""

SAME_NOTICE_S = 10.0
"""For this long after the first SIGTERM, others are taken for the same notice."""

STATUS = 128 + signal.SIGTERM
"""Exit status of a process whose training stands still: a shell's status for one that SIGTERM has ended."""


class StopSignal:
    """Notes SIGTERM and SIGUSR1 unless somebody else handles them; a later SIGTERM kills as ever, but not at once.

    One per Checkpointer. All that are open in a process note each signal; one that was dropped notes none.

    A handler that is installed later gets the signals from then on, and stays; it may call this one.

    If a scheduler signals all processes, a rank gets the signal twice, since its launcher passes it on.

    A launcher sends SIGTERM to the healthy ranks when one has died, too, and these may hang in a collective that will
    never end: it would kill them after half a minute. So SIGTERM wakes a thread, which ends the process if the main
    thread stands still. That loses nothing but what SIGKILL would lose.
    """

    def __init__(self, alone: bool = False) -> None:
        """`alone`: there are no other ranks, so whatever blocks the main thread ends, and no such thread is needed."""
        self.wanted = False
        self.alone = alone
        self.terminated_at: float | None = None
        """When the first SIGTERM came, by the monotonic clock."""
        self.removed = False
        """Whether signals are to have their default action, unless another one is open."""
        self._busy = False
        self._heeded = False
        try:
            self._install()
        except BaseException:
            self.remove()
            raise

    def _install(self) -> None:
        if _on_main():
            _handler.add(self)

    def note(self, number: int) -> bool:
        """Notes a signal that has come. Returns whether it is to have its default action, as far as this one knows."""
        self.wanted = True
        if number != signal.SIGTERM:
            return False
        now = time.monotonic()
        if self.terminated_at is None:
            self.terminated_at = now
            return False
        return now - self.terminated_at > SAME_NOTICE_S

    def note_step(self) -> None:
        """Notes that a step of the training is done."""
        _handler.note_step()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Lets the main thread stand still within: it waits for the state at hand to be saved, and that ends."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def heed(self) -> None:
        """Notes that the job stops now, or has come to its end: what it waits for from then on does not matter here."""
        self._heeded = True

    @property
    def may_stand_still(self) -> bool:
        """Whether the main thread may stand still now."""
        return self._busy or self._heeded

    def remove(self) -> None:
        """Gives signals their default action again, unless another one is open. Only the main thread can change that;
        if another thread calls it, that is done as the next signal comes."""
        self.removed = True
        if _on_main():
            _handler.tidy()


class _Handler:
    """Handles the signals of this process, for all open StopSignals, and has the thread that watches for them."""

    def __init__(self) -> None:
        self._added: tuple[weakref.ref[StopSignal], ...] = ()
        """Replaced as a whole, by the main thread: a signal may come meanwhile, and the watch reads it, too."""
        self.waits: Callable[[], bool] | None = None
        """Set while the main thread waits for a save: returns whether that wait ends by itself."""
        self._watch: _Watch | None = None

    @property
    def open(self) -> list[StopSignal]:
        return [stop for added in self._added if (stop := added()) is not None and not stop.removed]

    def add(self, stop: StopSignal) -> None:
        """Adds a StopSignal. On the main thread."""
        self.tidy()
        self._added = (*map(weakref.ref, self.open), weakref.ref(stop))
        for number in TOLD_BY:
            if signal.getsignal(number) == signal.SIG_DFL:
                signal.signal(number, self.note)
        if not stop.alone and self._watch is None and signal.getsignal(signal.SIGTERM) == self.note:
            self._watch = _Watch(self._is_told, self._may_stand_still)
            if not self._watch.begin():
                self._watch = None

    def tidy(self) -> None:
        """Ends what no open one needs. Some may have been dropped, or removed by another thread. On the main thread."""
        if all(stop.alone for stop in self.open):
            watch, self._watch = self._watch, None
            if watch is not None:
                watch.end()
        if not self.open:
            self._restore()

    def forget(self) -> None:
        """Resets a forked child as if all were removed."""
        self._added, self.waits = (), None
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.forget()
        self._restore()

    def _restore(self) -> None:
        for number in TOLD_BY:
            if signal.getsignal(number) == self.note:  # otherwise another handler was installed
                signal.signal(number, signal.SIG_DFL)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal. If none is open, it has its default action."""
        told = [stop.note(number) for stop in self.open]
        if all(told):
            _do_as_by_default(number)

    def note_step(self) -> None:
        """Notes a step, whichever Checkpointer it is told to: a process that does steps does not leave."""
        if self._watch is not None:
            self._watch.note_step()

    def _is_told(self) -> bool:
        """Returns whether SIGTERM comes here, or has come; if not, another handler was installed since, and has it."""
        watched = [stop for stop in self.open if not stop.alone]
        has_signal = signal.getsignal(signal.SIGTERM) == self.note
        return any(has_signal or stop.terminated_at is not None for stop in watched)

    def _may_stand_still(self) -> bool:
        """Returns whether the main thread may stand still now: a StopSignal or a wait for a save allows it."""
        return ((waits := self.waits) is not None and waits()) or any(stop.may_stand_still for stop in self.open)


class _Watch:
    """The thread that SIGTERM wakes, and that ends the process if the main thread stands still before it stops."""

    def __init__(self, is_told: Callable[[], bool], may_stand_still: Callable[[], bool]) -> None:
        """`is_told`: returns whether SIGTERM is for those who begin this, as far as can be known. `may_stand_still`:
        returns whether the main thread may stand still now."""
        self._is_told, self._may_stand_still = is_told, may_stand_still
        self._reads, self._writes = -1, -1
        """Ends of a pipe, to which the interpreter writes the number of each signal as it comes."""
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._since = time.monotonic()
        self._recent: deque[float] = deque(maxlen=RECENT)

    def begin(self) -> bool:
        """Begins the thread. Returns False, and begins nothing, if somebody else, such as asyncio, is told of signals
        in this way. If this is interrupted, `end` must still be called."""
        self._reads, self._writes = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writes, False)
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before == -1:
            self._thread = threading.Thread(target=self._run, name="ckptlib-stop", daemon=True)
            self._thread.start()
            return True
        signal.set_wakeup_fd(before)
        os.close(self._reads)
        os.close(self._writes)
        return False

    def note_step(self) -> None:
        now = time.monotonic()
        self._recent.append(now - self._since)
        self._since = now

    def _run(self) -> None:
        while not self._ended.is_set():
            if signal.SIGTERM in os.read(self._reads, 4096):
                self._watch_main()
        os.close(self._reads)

    def _watch_main(self) -> None:
        patience_s = max(LEFT_ALONE_S, 2 * max(self._recent, default=0.0))
        step, since = self._since, time.monotonic()
        at = step, _main_place()
        while not self._ended.wait(LOOK_EVERY_S):
            before, at = at, (self._since, _main_place())
            if at != before or self._may_stand_still():
                since = time.monotonic()
            stands_still = time.monotonic() - since > patience_s
            if (stands_still or self._since != step) and not self._is_told():
                return
            if stands_still:
                os._exit(STATUS)

    def end(self) -> None:
        """Tells the thread to end by itself; it may have ended before, since any signal wakes it."""
        if self._writes < 0:
            return
        self._unhook()
        self._ended.set()
        with suppress(BrokenPipeError, BlockingIOError):  # no one is left to wake, or the pipe has enough for it
            os.write(self._writes, b"\0")
        os.close(self._writes)
        if self._thread is None:  # otherwise the thread closes the end that it reads
            os.close(self._reads)

    def forget(self) -> None:
        """Resets a forked child, which has no such thread, and whose signals are not its parent's."""
        self._unhook()
        os.close(self._reads)
        os.close(self._writes)

    def _unhook(self) -> None:
        hooked = signal.set_wakeup_fd(-1)
        if hooked != self._writes:
            signal.set_wakeup_fd(hooked)


def _do_as_by_default(number: int) -> None:
    """Gives the signal its default action and raises it: a handler that called this one would only call it again."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _on_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _main_place() -> tuple[int, int]:
    """Returns the call and instruction at which the main thread is. They stay the same as long as C code runs there."""
    frame = sys._current_frames()[cast(int, threading.main_thread().ident)]
    return id(frame), frame.f_lasti


_handler = _Handler()


def handler() -> Callable[[int, FrameType | None], None] | None:
    """Returns the handler for all open ones, for whoever puts handlers back; None if none is open."""
    return _handler.note if _handler.open else None


@contextmanager
def waiting(ends: Callable[[], bool]) -> Iterator[None]:
    """Lets the main thread stand still within, as long as `ends` says that its wait for a save ends."""
    if not _on_main():  # the wait of another thread says nothing about the main one
        yield
        return
    before, _handler.waits = _handler.waits, ends
    try:
        yield
    finally:
        _handler.waits = before


_masked = threading.local()
"""The forking thread's mask, during a fork."""


def _before_fork() -> None:
    """Blocks the signals: a child would swallow one before its handler is gone, or take it for its parent's."""
    _masked.before = signal.pthread_sigmask(signal.SIG_BLOCK, TOLD_BY if _handler.open else ())


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masked.before)


def _in_child() -> None:
    """Resets a forked worker, so that the first SIGTERM ends it: its pool sends one and waits."""
    _handler.forget()
    _after_fork()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
