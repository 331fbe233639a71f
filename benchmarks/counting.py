"""Counts what an object store would be asked, and what that costs.

Requests are those of S3: a listing is one for each 1,000 keys, a deletion one for each 1,000 objects, an object of
several parts one for each part and two more.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil

from typing_extensions import Buffer, override

from ckptlib.stores.base import Entry, LateHead, Store, as_bytes
from ckptlib.stores.testing import _HookedStore

PAGE = 1000
"""Keys of a page of a listing, and objects that one request deletes."""

PART_BYTES = 16 * 1024 * 1024
"""Below it an object is put by one request."""

LARGE_PART_BYTES = 64 * 1024 * 1024
"""A part of an object of more than 128 parts grows up to this."""

DOLLARS = {"put": 0.005 / 1000, "list": 0.005 / 1000, "get": 0.0004 / 1000, "delete": 0.0}
"""Per request: S3 standard, us-east-1, list prices of November 2026."""


def num_puts(nbytes: int) -> int:
    """Requests that put an object from a slot: one, or its parts, and those that begin and complete it."""
    part = min(max(PART_BYTES, ceil(nbytes / 128 / 2**20) * 2**20), LARGE_PART_BYTES)
    return 1 if nbytes < PART_BYTES else ceil(nbytes / part) + 2


@dataclass(frozen=True, slots=True)
class Requests:
    """So many of each kind."""

    put: int = 0
    get: int = 0
    list: int = 0
    delete: int = 0

    @property
    def total(self) -> int:
        return self.put + self.get + self.list + self.delete

    @property
    def dollars(self) -> float:
        return sum(price * int(getattr(self, kind)) for kind, price in DOLLARS.items())

    def times(self, number: int) -> Requests:
        return Requests(self.put * number, self.get * number, self.list * number, self.delete * number)

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.put + other.put, self.get + other.get, self.list + other.list, self.delete + other.delete)


class CountingStore(_HookedStore):
    """A store that counts; as far from its callers as they think an object store is."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, "counting")
        self.is_local = False
        self.log: list[tuple[str, str]] = []
        """Of each call: what is done, and the first key or the prefix."""
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def requests(self) -> Requests:
        """Up to now."""
        with self._lock:
            return Requests(**self._counts)

    @contextmanager
    def counted(self) -> Iterator[list[Requests]]:
        """Its only item, at the end: what was asked inside."""
        before, found = Counter(self._counts), list[Requests]()
        yield found
        found.append(Requests(**(Counter(self._counts) - before)))

    def _count(self, kind: str, key: str, number: int = 1) -> None:
        with self._lock:
            self.log.append((kind, key))
            self._counts[kind] += number

    @override
    @contextmanager
    def _around(self, op: str, key: str, data: Buffer = b"") -> Iterator[Buffer]:
        if op in ("get", "get_into"):
            self._count("get", key)
        yield data

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
        held = [*pieces]
        nbytes = head.nbytes if isinstance(head, LateHead) else as_bytes(head).nbytes
        self._count("put", key, num_puts(nbytes + sum(as_bytes(piece).nbytes for piece in held)))
        self._inner.put(key, head, held, create=create, deadline=deadline)

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        found = self._inner.scan(prefix, after)
        self._count("list", prefix, max(1, ceil(len(found) / PAGE)))
        return found

    @override
    def delete(self, *keys: str) -> None:
        self._count("delete", keys[0], ceil(len(keys) / PAGE))
        self._inner.delete(*keys)
