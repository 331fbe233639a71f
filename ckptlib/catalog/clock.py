"""The time by a store's own clock, by which the ages of its objects are measured. No torch."""

from __future__ import annotations

from ckptlib.errors import StoreError, StoreFull
from ckptlib.format import keys
from ckptlib.stores import Store

CLOCK = f"{keys.TRASH}clock-"
"""The prefix of objects that are put to learn the store's time; a crash may leave one."""


def now(store: Store) -> float:
    """Returns the time by the store's own clock, from an object that is put for this.

    If the store is full, returns the time of its newest object: that is not later, so nothing looks older than it is.
    """
    key = f"{CLOCK}{keys.new_nonce()}.json"
    try:
        store.put(key, b"")  # a full disk often takes a file of no bytes
    except StoreFull:
        return max((entry.modified for entry in store.scan("")), default=0.0)
    try:
        found = store.entry(key)
    finally:
        store.delete(key)
    if found is None:
        raise StoreError(f"{store.url}/{key}: was put, but is not listed; nothing is deleted from such a store")
    return found.modified
