"""The threads that carry out the requests of one read; none besides the caller's if one is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

A = TypeVar("A")
B = TypeVar("B")


class Hands:
    """Makes up to `num` calls at once.

    If `num` is 1, the caller's thread makes them: handing over 150 requests and their results wakes two threads each
    time, which take the interpreter's lock from each other.
    """

    def __init__(self, num: int) -> None:
        self._executor = ThreadPoolExecutor(num, "ckptlib-read") if num > 1 else None

    def map(self, call: Callable[[A], B], on: Iterable[A]) -> Iterator[B]:
        """Yields the results, in order. Raises what a call raised, when its turn comes."""
        return map(call, on) if self._executor is None else self._executor.map(call, on)

    def stop(self) -> None:
        """Waits until no call is running; drops calls that have not begun."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
