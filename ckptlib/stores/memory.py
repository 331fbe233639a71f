"""Objects in a dict of this process: for tests and trials; nothing outlives the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from operator import attrgetter
from typing import ClassVar

from typing_extensions import Buffer, override

from ckptlib.errors import ObjectNotFound
from ckptlib.stores.base import (
    Entry,
    LateHead,
    Store,
    as_bytes,
    check_key,
    check_prefix,
    check_range,
    joined,
    range_nbytes,
    taken,
)


class MemoryStore(Store):
    """A store of its own; `MemoryStore.named` shares one by its name."""

    _by_name: ClassVar[dict[str, MemoryStore]] = {}
    _by_name_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self.pack_nbytes = self.late_nbytes = 1 << 40
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """Returns the store that everybody in this process gets under `name`."""
        with cls._by_name_lock:
            return cls._by_name.setdefault(name, cls(name))

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
        check_key(key)
        stored = joined(key, head, pieces)
        with self._lock:
            if key in self._objects:
                raise taken(f"{self.url}/{key}")
            self._objects[key] = (stored, time.time())

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        check_range(offset, nbytes)
        check_key(key)
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise ObjectNotFound(f"{self.url}/{key}: no such object")
        data = found[0]
        return data[offset : offset + range_nbytes(f"{self.url}/{key}", offset, nbytes, len(data))]

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        as_bytes(buffer)[:] = self.get(key, offset, buffer.nbytes)

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        check_prefix(prefix)
        with self._lock:
            found = [
                Entry(key, len(data), modified)
                for key, (data, modified) in self._objects.items()
                if key.startswith(prefix) and key > after
            ]
        return sorted(found, key=attrgetter("key"))

    @override
    def delete(self, *keys: str) -> None:
        for key in [*map(check_key, keys)]:
            with self._lock:
                self._objects.pop(key, None)
