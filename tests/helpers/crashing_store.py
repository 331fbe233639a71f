"""A store that dies under its user after so many operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from typing_extensions import Buffer, override

from ckptlib.errors import StoreError
from ckptlib.stores import Store
from ckptlib.stores.testing import _HookedStore


class Crash(StoreError):
    pass


class CrashingStore(_HookedStore):
    """Does `left` operations, and from then on nothing at all."""

    def __init__(self, inner: Store, left: int) -> None:
        super().__init__(inner, "crash")
        self._left = left

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        self._left -= 1
        if self._left < 0:
            raise Crash(f"{op} {key}")
        yield data
