"""A thread with an event loop, where requests can be waited for until a deadline, and given up for good.

Knows nothing of stores: it runs coroutines, and hands the pieces of an upload from one thread to another.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from functools import cache
from typing import Any, Generic, TypeVar

from typing_extensions import Self

T = TypeVar("T")

END_S = 5.0
"""Seconds that something given up may take to end; measured: 2 ms."""

_process: int | None = None
"""Id of the process that uses the client: the client's threads are not there in one that is forked from it."""

_QUIET_S = 0.05
"""Seconds without a sign of the client's threads after which they are taken to wait for nothing of Python's."""


class GivenUp(Exception):
    """Something was not done by its deadline."""


class ClientLoop:
    """Runs coroutines in its thread, which it starts when it is first used."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, work: Coroutine[Any, Any, T], deadline: float | None = None) -> Running[T]:
        """Runs `work` in the loop's thread until the deadline; not at all after it.

        Raises RuntimeError in a process forked from one that used the client.
        """
        if not _is_own_process():
            work.close()
            raise RuntimeError("obstore was used before this process was forked, and cannot be used in it: spawn it")
        with self._lock:
            if self._loop is None:
                _wait_at_exit()
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
                self._thread.start()
            return Running(self._loop, work, deadline)

    def run(self, work: Coroutine[Any, Any, T], deadline: float | None = None) -> T:
        """Returns the result of `work`, or raises its error. Raises GivenUp at the deadline, when `work` has ended."""
        return self.start(work, deadline).result()

    def close(self) -> None:
        with self._lock:
            if self._loop is not None and self._thread is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(END_S)
                if not self._thread.is_alive():
                    self._loop.close()
            self._loop = self._thread = None


_OVER: concurrent.futures.Future[Any] = concurrent.futures.Future()
_OVER.set_result(None)


class Running(Generic[T]):
    """A coroutine in the thread of a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], deadline: float | None) -> None:
        self.loop = loop
        self._work, self._deadline = work, deadline
        self._task: asyncio.Task[T] | None = None
        self.ended: concurrent.futures.Future[T] = concurrent.futures.Future()
        """Done only when the coroutine has ended, after a cancel, too."""
        loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if _left(self._deadline) == 0:  # else it might send something before `result` gives it up
            self._work.close()
            self.ended.set_exception(GivenUp())
            return
        self._task = self.loop.create_task(self._work)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        self._task = None
        if task.cancelled():
            self.ended.set_exception(GivenUp())
        elif error := task.exception():
            self.ended.set_exception(error)
        else:
            self.ended.set_result(task.result())

    def result(self) -> T:
        """Returns the result. Raises GivenUp at the deadline. Whatever it raises, the coroutine has ended."""
        try:
            concurrent.futures.wait([self.ended], _left(self._deadline))
        finally:
            self.cancel()
        ended, self.ended = self.ended, _OVER
        if (error := ended.exception(0.0)) is None:
            return ended.result()
        del ended
        try:
            raise error
        finally:
            del error  # its traceback would keep it alive, and with it what the upload read

    def cancel(self) -> None:
        """Cancels the coroutine, and returns when it has ended."""
        if not self.ended.done():
            self.loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())
            concurrent.futures.wait([self.ended], END_S)


class Feed:
    """Passes the pieces of an upload from the thread that takes them to the client, which asks for one at a time.

    So an iterator that computes for a while keeps nobody from sending what it gave before.
    """

    def __init__(self, lent: Lent) -> None:
        self._lent = lent
        self._asked = threading.Semaphore(0)
        self._pieces: asyncio.Queue[memoryview | None] = asyncio.Queue()

    def watch(self, client: Running[Any]) -> None:
        """Watches the client that asks for pieces: nothing waits for it once it has ended."""
        self._client = client
        client.ended.add_done_callback(lambda _: self._asked.release())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> memoryview:
        self._asked.release()
        piece = await self._pieces.get()
        if piece is None:
            raise StopAsyncIteration
        return self._lent.lend(piece)

    def give(self, piece: memoryview | None, deadline: float | None) -> bool:
        """Gives the client a piece when it asks; None ends the upload. Returns False if it ended without asking.

        Raises GivenUp at the deadline.
        """
        if not self._asked.acquire(timeout=_left(deadline)):
            raise GivenUp
        if self._client.ended.done():
            return False
        self._client.loop.call_soon_threadsafe(self._pieces.put_nowait, piece)
        return True

    def close(self) -> None:
        """Answers later requests that there is no more."""
        self._client.loop.call_soon_threadsafe(self._pieces.put_nowait, None)


class Lent:
    """Memory that the client reads in place, and has let go of when `release` returns.

    A view of memory cannot be released while somebody else holds its buffer. So this looks at the client's own hold on
    it, and not at whether its requests seem to be over.
    """

    def __init__(self, pieces: Iterable[memoryview] = ()) -> None:
        """`pieces`: lent one after the other to whoever iterates over this."""
        self._pieces = deque(pieces)
        self._views: deque[memoryview] = deque()
        self._lock = threading.Lock()
        self._is_open = True

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> memoryview:
        try:
            return self.lend(self._pieces.popleft())
        except IndexError:
            raise StopIteration from None

    def lend(self, piece: memoryview) -> memoryview:
        """Lends a piece to the client when it asks: the client holds all that it was given before, or has sent it. What
        it has sent is forgotten here, so that its memory can be freed."""
        with self._lock:
            if not self._is_open:
                raise RuntimeError("the upload was given up")
            while self._views and _released(self._views[0]):
                self._views.popleft()
            self._views.append(piece[:])
            return self._views[-1]

    def release(self) -> None:
        """Waits until the client has let go, which takes moments; after END_S it keeps the memory."""
        with self._lock:
            self._is_open = False
        self._pieces.clear()  # the client may forget its iterator much later
        until = time.monotonic() + END_S
        while self._views and time.monotonic() < until:
            if _released(self._views[0]):
                self._views.popleft()
            else:
                time.sleep(0.001)


def _released(view: memoryview) -> bool:
    try:
        view.release()
    except BufferError:
        return False
    return True


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _is_own_process() -> bool:
    global _process
    if _process is None:
        _process = os.getpid()
    return _process == os.getpid()


@cache
def _wait_at_exit() -> None:
    """Waits, before an interpreter older than 3.14 ends, for the client's threads to leave it.

    These threads tell of a result, and let go of memory, a moment after whoever waits for it goes on. If one is inside
    when the interpreter ends, it is ended, which aborts the process: 1 exit in 3 when it came right after a put.
    """
    atexit.register(_wait_until_quiet)


def _wait_until_quiet() -> None:
    until = time.monotonic() + END_S
    quiet_since = time.monotonic()
    while quiet_since + _QUIET_S > (now := time.monotonic()) and now < until:
        time.sleep(0.002)
        known = {thread.ident for thread in threading.enumerate()}
        if sys._current_frames().keys() - known:
            quiet_since = time.monotonic()
