"""Many documents at once: the latency of a request counts, some 30 ms with an object store.

Knows threads and order, not the documents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from ckptlib.errors import CkptError
from ckptlib.stores.io_limits import DOCUMENT_THREADS, THREADS

AHEAD = 2 * THREADS
"""Items handed out before the result of the first is looked at."""

T = TypeVar("T")
R = TypeVar("R")


def in_order(executor: Executor, call: Callable[[T], R], items: Iterable[T], ahead: int = AHEAD) -> Iterator[R]:
    """Results in the order of the items, of which only `ahead` are taken before they are asked for.

    Where one raises, or nobody asks any more, those that have not begun never do: each may take a minute to fail.
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
    """As `in_order`, by as many threads as are good for documents. Raises what `call` raises for the first item."""
    with ThreadPoolExecutor(DOCUMENT_THREADS, "ckptlib-documents") as executor:
        yield from in_order(executor, call, items, 2 * DOCUMENT_THREADS)


def warm(call: Callable[[T], object], items: Sequence[T]) -> None:
    """Calls a function that remembers its results, so that later calls need not wait.

    A call that fails now fails again later.
    """

    def quietly(item: T) -> None:
        with suppress(CkptError):
            call(item)

    if len(items) > 1:
        for _ in each(quietly, items):
            pass
