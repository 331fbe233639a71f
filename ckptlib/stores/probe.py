"""A dry run of a store: puts, lists, gets and deletes one small object, so that a wrong URL or right fails at once."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from ckptlib.errors import StoreDenied, StoreError
from ckptlib.stores import Entry, Store

log = logging.getLogger(__name__)

PREFIX = "probe/"
_NAME = re.compile(r"probe/[0-9a-f]{16}")

Result = TypeVar("Result")


def probe(store: Store, must_delete: bool = True) -> Mapping[str, float]:
    """Returns the seconds that put, scan, get and delete took. Raises the store's errors, and StoreError for a lie.

    Without `must_delete`, it only warns if nothing may be deleted, as in a bucket that nobody shall empty.
    """
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
        try:
            timed("delete", lambda: store.delete(key))
        except StoreDenied as error:
            if must_delete:
                raise
            log.warning(
                "%s. All steps stay, whatever keep= says, and each start leaves an object below %s", error, PREFIX
            )
    return seconds


def left(store: Store, oldest: float) -> list[Entry]:
    """Returns what dry runs and measurements that were killed before `oldest`, by the store's clock, have left."""
    return [entry for entry in store.scan(PREFIX) if _NAME.fullmatch(entry.key) and entry.modified < oldest]
