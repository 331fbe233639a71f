"""A writer's store requests in flight, and since when each makes no progress. No torch."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from typing_extensions import Buffer, override

from ckptlib.stores import Entry, InPlace, LateHead, Store


@dataclass(frozen=True, slots=True)
class Request:
    """A request that the store has not answered yet."""

    op: str
    key: str
    since: float
    """When it began, or last took a piece; by the monotonic clock, which trainer and writer share. Infinite while the
    next piece is being made: then nobody waits for the store."""

    @override
    def __str__(self) -> str:
        return f"{self.op} {self.key}"


class Requests:
    """The requests in flight. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._under_way: dict[int, Request] = {}

    @contextmanager
    def note(self, op: str, key: str) -> Iterator[Callable[[float], None]]:
        """Counts a request as in flight within the context. Yields a function to call when it makes progress, with the
        new `Request.since`."""
        request, number = Request(op, key, time.monotonic()), next(self._numbers)

        def moved(since: float) -> None:
            with self._lock:
                if number in self._under_way:  # a thread of the store may be late
                    self._under_way[number] = replace(request, since=since)

        with self._lock:
            self._under_way[number] = request
        try:
            yield moved
        finally:
            with self._lock:
                del self._under_way[number]

    def oldest(self) -> Request | None:
        """Returns the request that has stood still for longest; None while the store is asked nothing."""
        with self._lock:
            asked = [request for request in self._under_way.values() if request.since < math.inf]
        return min(asked, key=lambda request: request.since, default=None)


class NotedStore(Store):
    """A store whose requests are noted while they are under way."""

    def __init__(self, inner: Store, requests: Requests) -> None:
        self.url, self.is_local = inner.url, inner.is_local
        self.pack_nbytes, self.late_nbytes = inner.pack_nbytes, inner.late_nbytes
        self._inner = inner
        self._requests = requests

    @override
    def put(
        self,
        key: str,
        head: Buffer | LateHead,
        pieces: Iterable[Buffer] = (),
        *,
        create: bool = False,
        deadline: float | None = None,
    ) -> None:
        with self._requests.note("put", key) as moved:

            def taken() -> Iterator[Buffer]:
                made = iter(pieces)
                while True:
                    moved(math.inf)
                    piece = next(made, None)
                    moved(time.monotonic())
                    if piece is None:
                        return
                    yield piece

            noted = InPlace(pieces.nbytes, taken()) if isinstance(pieces, InPlace) else taken()
            self._inner.put(key, head, () if pieces == () else noted, create=create, deadline=deadline)

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        with self._requests.note("get", key):
            return self._inner.get(key, offset, nbytes)

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        with self._requests.note("get", key):
            self._inner.get_into(key, offset, buffer, deadline=deadline)

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        with self._requests.note("list", prefix):
            return self._inner.scan(prefix, after)

    @override
    def flush(self, prefix: str) -> None:
        with self._requests.note("flush", prefix):
            self._inner.flush(prefix)

    @override
    def delete(self, *keys: str) -> None:
        with self._requests.note("delete", keys[0] if keys else ""):
            self._inner.delete(*keys)

    @override
    def free_nbytes(self) -> int | None:
        return self._inner.free_nbytes()

    @override
    def clean(self, before: float, is_ours: Callable[[str], bool]) -> None:
        with self._requests.note("clean", "uploads"):
            self._inner.clean(before, is_ours)

    @override
    def close(self) -> None:
        self._inner.close()
