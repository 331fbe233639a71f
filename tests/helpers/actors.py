"""Processes of a job that run in one thread: their way to the store, their death there, and nothing left to chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import Buffer, override

from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import _HookedStore
from ckptlib.writer import rescue as rescue_module


class Crash(BaseException):
    """Nobody catches it: the process is gone."""


class ActorStore(_HookedStore):
    """One process's way to the store. Does `left` operations more, and then nothing at all.

    `before` is called before each operation, as another process may run there.
    """

    def __init__(self, inner: MemoryStore, left: int | None = None) -> None:
        super().__init__(inner, "actor")
        self.left = left
        self.before: Callable[[str, str], None] = lambda op, key: None

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash(f"{op} {key}")
        self.before(op, key)
        yield data


class Inline(Executor):
    """Runs what it is given at once."""

    @override
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def no_chance() -> Iterator[None]:
    """Names are counted, not drawn, and nobody waits: the same job does the same again."""
    numbers, seconds = count(1), [0.0]

    def sleep(duration: float) -> None:
        seconds[0] += duration

    clock = SimpleNamespace(monotonic=lambda: seconds[0], sleep=sleep, time=lambda: seconds[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckptlib.writer.persist.new_nonce", lambda: f"{next(numbers):08x}")
        patch.setattr("ckptlib.format.keys.new_nonce", lambda: f"{next(numbers):08x}")
        patch.setattr("ckptlib.writer.parents.time", clock)
        patch.setattr("ckptlib.writer.persist.time", clock)
        patch.setattr("ckptlib.catalog.reading.ThreadPoolExecutor", lambda *_: Inline())
        patch.setattr("ckptlib.writer.coder.ThreadPoolExecutor", lambda *_: Inline())
        patch.setattr(rescue_module, "time", clock)
        patch.setattr(rescue_module, "SHARES_TIMEOUT_S", 0.1)
        yield
