"""The threads that carry out the requests of one read; or none beside the one that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

from typing_extensions import Self

A = TypeVar("A")
B = TypeVar("B")


class Hands:
    """So many at once.

    One works on the thread that asks: to be handed 150 requests, and to hand back what became of them, wakes two
    threads each time, which take the interpreter's lock from each other.
    """

    def __init__(self, num: int) -> None:
        self._executor = ThreadPoolExecutor(num, "ckptlib-read") if num > 1 else None

    def map(self, call: Callable[[A], B], on: Iterable[A]) -> Iterator[B]:
        """The results, in order. Raises what a call raises, when its turn comes."""
        return map(call, on) if self._executor is None else self._executor.map(call, on)

    def stop(self) -> None:
        """Returns when no call is under way any more; those that did not begin are dropped."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
