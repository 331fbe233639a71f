"""Stores: where checkpoints live. `open_store(url)` picks the implementation by the URL's scheme."""

from __future__ import annotations

from collections.abc import Mapping

from ckptlib.stores.base import Entry, Store, Upload, check_key

__all__ = ["Entry", "Store", "Upload", "check_key", "open_store"]


def open_store(url: str, options: Mapping[str, object] | None = None) -> Store:
    """The store at `url`: a path, `file://`, `memory://`, or any URL that fsspec knows.

    `options` go to fsspec's filesystem as they are (credentials, endpoint, ...); local paths take none. The schemes
    `latency+...` and `fault+...` are those of `ckptlib.testing`. Nothing is read or written yet.
    """
    scheme, found, rest = url.partition("://")
    if not found:
        scheme, rest = "file", url
    if scheme == "file":
        from ckptlib.stores.local import LocalStore

        return LocalStore(rest)
    if scheme == "memory":
        from ckptlib.stores.memory import MemoryStore

        return MemoryStore.named(rest)
    if scheme.startswith(("latency+", "fault+")):
        from ckptlib.testing import open_testing_store

        return open_testing_store(url, options)
    from ckptlib.stores.remote import FsspecStore

    return FsspecStore(url, options or {})
