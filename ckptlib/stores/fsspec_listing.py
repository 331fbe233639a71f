"""Listings of one of fsspec's filesystems: all objects below a prefix, or those of the root's own level.

Some filesystems list all below a prefix by one request for each thousand objects; of others each directory is listed.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from ckptlib.errors import StoreError, StoreTimeout
from ckptlib.stores.base import Entry, is_key
from ckptlib.stores.fsspec_client import Client
from ckptlib.stores.fsspec_errors import ABSENT, NoBucket

LISTING_NBYTES = 50_000_000
"""A listing may take as long as this many bytes: nothing is seen of it before its last page."""

_LISTING_TRIES = 10
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "created")


class Listing:
    """Lists the objects of one store, afresh each time. Raises what the backend raises."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._is_flat = _lists_flat(client.fs)

    def below(self, directory: str) -> list[Entry]:
        """Returns every object whose key begins with `directory` and a slash; all objects for ""."""
        self._client.fs.invalidate_cache()
        return self._entries(self._below(f"{self._client.root}/{directory}".rstrip("/")))

    def level(self) -> list[Entry]:
        """Returns the objects that lie in the root itself."""
        self._client.fs.invalidate_cache()
        return self._entries(self._list(self._client.root))

    def _entries(self, found: Iterable[Mapping[str, Any]]) -> list[Entry]:
        entries = (self._entry(info) for info in found if info["type"] == "file")
        return [entry for entry in entries if is_key(entry.key)]

    def _below(self, path: str) -> Iterable[dict[str, Any]]:
        """Returns every file. If one listing takes too long, as of some hundred thousand, each directory has one."""
        if self._is_flat:
            # Of a wrong address, the listings would take four minutes to tell. A byte of an object is asked for: if one
            # may not ask for the bucket itself, gcsfs lists all that lies in it.
            self._client.check_there(f"{self._client.root}/ckptlib.json")
            with contextlib.suppress(StoreTimeout):
                return self._find(path)
        return self._walk(path)

    def _find(self, path: str) -> list[dict[str, Any]]:
        try:
            found = self._client.call("find", path, detail=True, nbytes=LISTING_NBYTES)
        except FileNotFoundError:
            found = {}
        if not found and self._client.is_object_store:
            bucket = path.lstrip("/").partition("/")[0]
            if not self._client.call("exists", bucket):  # some backends find nothing there, and raise nothing
                raise NoBucket("no such bucket")
        return list(found.values()) if isinstance(found, dict) else []  # a list: adlfs, when the path is an object

    def _walk(self, path: str) -> Iterator[dict[str, Any]]:
        """Yields every file below a directory. `fs.walk` would leave out what it cannot list."""
        for info in self._list(path):
            if info["type"] != "directory":
                yield info
            elif info["name"].rstrip("/") != path:
                yield from self._walk(info["name"].rstrip("/"))

    def _list(self, path: str) -> list[dict[str, Any]]:
        for _ in range(_LISTING_TRIES):
            try:
                return list(self._client.call("ls", path, detail=True, nbytes=LISTING_NBYTES))
            except ABSENT:  # the directory, or a file that was deleted while its directory was listed
                try:
                    if self._client.call("info", path)["type"] != "directory":
                        return []
                except ABSENT:
                    return []
        raise OSError(errno.EAGAIN, f"files vanished during each of {_LISTING_TRIES} listings of {path}")

    def _entry(self, info: Mapping[str, Any]) -> Entry:
        if (size := info["size"]) is None:
            raise StoreError(f"{info['name']} is listed without a size, as by web pages; copy it to a path or a bucket")
        return Entry(str(info["name"]).removeprefix(self._client.root).removeprefix("/"), int(size), _modified(info))


def _lists_flat(fs: AbstractFileSystem) -> bool:
    """Returns whether the filesystem lists all below a prefix itself, rather than directory by directory."""
    if isinstance(fs, AsyncFileSystem):
        return type(fs)._find is not AsyncFileSystem._find
    return type(fs).find is not AbstractFileSystem.find


def _modified(info: Mapping[str, Any]) -> float:
    value = next((info[name] for name in _MODIFIED if info.get(name) is not None), None)
    if isinstance(value, str):
        value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    if value is None:
        return time.time()  # as if put just now: never old enough to be deleted
    return float(value)
