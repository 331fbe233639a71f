"""Processes that take turns at a store, one operation at a time, in an order that the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from helpers.actors import ActorStore
from typing_extensions import Self

from ckptlib.stores import Store
from ckptlib.stores.memory import MemoryStore

TIMEOUT_S = 150.0

Operation = tuple[str, str]
"""What is done, and to which key."""


class Actor:
    """A process: a thread that stands still before each operation of the store until it is told to go on.

    Use it under `no_chance`, so that it does one operation at a time. Its end waits until it is done.
    """

    def __init__(self, store: MemoryStore, act: Callable[[Store], object]) -> None:
        self._store = ActorStore(store)
        self._store.before = self._before
        self._act = act
        self._turn = threading.Semaphore(0)
        self._stands = threading.Semaphore(0)
        self._next: Operation | None = None
        self.done = False
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._await()

    def go(self, until: Callable[[Operation], bool] = lambda operation: False) -> None:
        """Goes on until its next operation is such a one; by default to the end."""
        while not self.done and not (self._next is not None and until(self._next)):
            self._turn.release()
            self._await()

    def go_on(self, num: int) -> None:
        """So many operations."""
        left = [num]

        def enough(operation: Operation) -> bool:
            left[0] -= 1
            return left[0] < 0

        self.go(enough)

    def _await(self) -> None:
        assert self._stands.acquire(timeout=TIMEOUT_S), f"stuck before {self._next}"

    def _before(self, op: str, key: str) -> None:
        self._next = op, key
        self._stands.release()
        assert self._turn.acquire(timeout=TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._act(self._store)
        except Exception as error:
            self.error = error
        self.done = True
        self._stands.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.go()
        self._thread.join(TIMEOUT_S)
