"""The store as the trainer sees it: no call blocks training for longer than a limit, whatever the store does.

The stores of ckptlib bound their requests; a user's own store, or a file system that hangs, may not. A call that hangs
cannot be cancelled: its thread is abandoned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from typing_extensions import Buffer, override

from ckptlib.errors import StoreError, StoreTimeout, describe
from ckptlib.stores import Entry, LateHead, Store
from ckptlib.stores.bounded import in_thread

T = TypeVar("T")

log = logging.getLogger(__name__)


class BoundedStore(Store):
    """A store that raises StoreTimeout from a call that does not end within `limit_s`; the call may still take
    effect."""

    def __init__(self, inner: Store, limit_s: float) -> None:
        self.url, self.is_local = inner.url, inner.is_local
        self.pack_nbytes, self.late_nbytes = inner.pack_nbytes, inner.late_nbytes
        self._inner = inner
        self._limit_s = limit_s

    def _within(self, what: str, call: Callable[[], T]) -> T:
        try:
            return in_thread(call, self._limit_s)
        except TimeoutError as error:
            raise StoreTimeout(
                f"{self.url}: {what} was not answered within {self._limit_s:.0f} s; is the store reachable from this "
                "host? Check with: ckptlib doctor URL"
            ) from error

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
        self._within(f"put {key}", lambda: self._inner.put(key, head, pieces, create=create, deadline=deadline))

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return self._within(f"get {key}", lambda: self._inner.get(key, offset, nbytes))

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        """Reads in this thread; the store itself must end by the deadline. An abandoned thread could write to the
        buffer, which is a tensor, long after the caller has gone on."""
        limit = time.monotonic() + self._limit_s
        self._inner.get_into(key, offset, buffer, deadline=limit if deadline is None else min(limit, deadline))

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        return self._within(f"list {prefix}", lambda: self._inner.scan(prefix, after))

    @override
    def peek(self, most: int) -> list[str]:
        return self._within("list", lambda: self._inner.peek(most))

    @override
    def flush(self, prefix: str) -> None:
        self._within(f"flush {prefix}", lambda: self._inner.flush(prefix))

    @override
    def delete(self, *keys: str) -> None:
        self._within(f"delete {keys[0] if keys else ''}", lambda: self._inner.delete(*keys))

    @override
    def clean(self, before: float, is_ours: Callable[[str], bool]) -> None:
        self._within("clean", lambda: self._inner.clean(before, is_ours))

    @override
    def close(self) -> None:
        """Closes the store, or leaves it open if that hangs or fails: nothing is lost, and training is at its end."""
        try:
            self._within("close", self._inner.close)
        except StoreError as error:
            log.info("%s is left open: %s", self.url, describe(error))
