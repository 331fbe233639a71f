"""A dry run of a store: one small object put, listed, got and deleted, so that a wrong URL or right fails at once."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from ckptlib.errors import StoreError
from ckptlib.stores import Entry, Store

PREFIX = "probe/"
_NAME = re.compile(r"probe/[0-9a-f]{16}")

Result = TypeVar("Result")


def probe(store: Store) -> Mapping[str, float]:
    """Seconds that each of put, scan, get and delete took. Raises the store's errors, and StoreError for a lie."""
    key = f"{PREFIX}{secrets.token_hex(8)}"
    data = secrets.token_bytes(64)
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Result]) -> Result:
        began = time.perf_counter()
        result = call()
        seconds[name] = time.perf_counter() - began
        return result

    timed("put", lambda: store.put(key, data))
    try:
        listed = timed("list", lambda: [entry.key for entry in store.scan(PREFIX)])
        if key not in listed:
            raise StoreError(f"{store.url}: {key} was put, but is not listed; ckptlib needs consistent listings")
        if timed("get", lambda: store.get(key)) != data:
            raise StoreError(f"{store.url}: get returned other bytes of {key} than were put")
    finally:
        timed("delete", lambda: store.delete(key))
    return seconds


def left(store: Store, oldest: float) -> list[Entry]:
    """What dry runs and measurements that were killed before this moment, by the store's clock, have left."""
    return [entry for entry in store.scan(PREFIX) if _NAME.fullmatch(entry.key) and entry.modified < oldest]
