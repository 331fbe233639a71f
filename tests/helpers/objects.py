"""What lies inside stores: the objects of one in memory, the client of one elsewhere, the store that another wraps."""

from __future__ import annotations

from typing import Any

from ckptlib.stores import Store
from ckptlib.stores.memory import MemoryStore


def objects_of(store: MemoryStore) -> dict[str, tuple[bytes, float]]:
    """Its content, and when it was put, by key; to be altered."""
    return store._objects


def client_of(store: Store) -> Any:
    """The fsspec file system behind it."""
    return store._client.fs  # type: ignore[attr-defined]


def wrapped_by(store: Store) -> Store:
    found: Store = store._inner  # type: ignore[attr-defined]
    return found
