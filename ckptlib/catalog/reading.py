"""Reads many documents at once, since each request to an object store has a latency of some 30 ms.

This module knows threads and order, not the documents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

from typing_extensions import override

from ckptlib.errors import CkptError
from ckptlib.stores.io_limits import DOCUMENT_THREADS, THREADS

AHEAD = 2 * THREADS
"""How many items are submitted before the result of the first is returned."""

T = TypeVar("T")
R = TypeVar("R")


class GeneratorThreads(ThreadPoolExecutor):
    """Threads for a generator, which waits for them when it ends, and not when it is left unfinished.

    Then the garbage collector may be what closes it, in any thread, wherever that is. If it is in the midst of its own
    start, it holds a lock of `threading` that no thread can end without: to wait for one there is to wait for ever, and
    no other thread of the process starts any more.
    """

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        left = kind is GeneratorExit
        self.shutdown(wait=not left, cancel_futures=left)


def in_order(executor: Executor, call: Callable[[T], R], items: Iterable[T], ahead: int = AHEAD) -> Iterator[R]:
    """Yields results in the order of the items; takes at most `ahead` items before their results are asked for.

    If a call raises, or the caller stops, calls that have not begun are cancelled: each may take a minute to fail.
    """
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(executor.submit(call, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for left in waiting:
            left.cancel()


def each(call: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yields as `in_order` does, by as many threads as are good for documents. Raises what `call` raises for the first
    item that fails."""
    with GeneratorThreads(DOCUMENT_THREADS, "ckptlib-documents") as executor:
        yield from in_order(executor, call, items, 2 * DOCUMENT_THREADS)


def warm(call: Callable[[T], object], items: Sequence[T]) -> None:
    """Calls a function that caches its results for all items at once, so that later calls need not wait.

    Errors are ignored: a call that fails now is made again later.
    """

    def quietly(item: T) -> None:
        with suppress(CkptError):
            call(item)

    if len(items) > 1:
        for _ in each(quietly, items):
            pass
