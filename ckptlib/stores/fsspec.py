"""Objects behind any URL that fsspec knows: S3, GCS, Azure, SFTP, ...

fsspec is used only here and in the `fsspec_` modules beside this one, since it has traps:

* `open(url, "wb")` publishes what was written when an exception leaves the block. Objects are put whole by `pipe_file`.
* Listings are cached, and `walk` takes an error for an empty directory. Both are off here.
* Instances are shared by everybody who gives equal arguments. Ours are our own.

A key that is put twice is overwritten: S3 can refuse that, but then a request sent again because its answer was lost
is refused as well. ckptlib's keys carry a random part, and if they do not, every writer puts the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from typing_extensions import Buffer, override

from ckptlib.errors import StoreError
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
)
from ckptlib.stores.fsspec_client import Client
from ckptlib.stores.fsspec_errors import ABSENT, NoBucket, is_behind_the_end, is_page
from ckptlib.stores.fsspec_listing import Listing
from ckptlib.stores.io_limits import DOCUMENT_THREADS

PACK_NBYTES = 64 << 20
"""Most bytes of a pack: several objects at a time are held in memory until they are put. Large enough that the time of
a request does not matter."""


class FsspecStore(Store):
    """The objects below `url`; `options` are those of fsspec's filesystem.

    It is as atomic and as durable as the backend's `pipe_file`: on object stores an object appears whole or not at all;
    on SFTP and its like a crash in the middle of a put leaves a torn file.

    A request that takes too long is given up and sent again. If the backend cannot be interrupted, what was given up
    may still be carried out: an object may appear after its put has failed. Its key is random, or its bytes are always
    the same, so that nothing is harmed.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self._client = Client(url, options)
        self._listing = Listing(self._client)
        self.url = self._client.url
        self.pack_nbytes, self.late_nbytes = PACK_NBYTES, PACK_NBYTES // 2

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
        path, body = self._path(key), joined(key, head, pieces)  # some backends take nothing but bytes
        pipe = partial(self._client.call, "pipe_file", path, body, nbytes=len(body), deadline=deadline)
        with self._client.failures("put", key, len(body)):
            try:
                pipe()
            except FileNotFoundError:
                if self._client.is_object_store:  # an object store has no directories to miss
                    raise NoBucket("no such bucket") from None
                self._put_anew(key, pipe, deadline)

    def _put_anew(self, key: str, pipe: Callable[[], object], deadline: float | None) -> None:
        """Makes the directory, and puts again. Other ranks may make it as well: some backends then say that they cannot
        make it, at each level of the path, and by no error of its own."""
        directory = self._path(key).rpartition("/")[0]
        for levels in reversed(range(key.count("/") + 1)):
            failure: OSError | None = None
            try:
                self._client.call("makedirs", directory, exist_ok=True, deadline=deadline)
            except OSError as error:
                failure = error
            try:
                pipe()
                return
            except FileNotFoundError as error:
                if failure is None or not levels:
                    raise failure or error from None

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        return self._get(key, offset, nbytes, None)

    def _get(self, key: str, offset: int, nbytes: int | None, deadline: float | None) -> bytes:
        check_range(offset, nbytes)
        path, where = self._path(key), f"{self.url}/{key}"
        with self._client.failures("get", key):
            if not _needs_size_first(nbytes):
                data = self._cat(path, offset, nbytes, deadline)
                if data and nbytes in (None, len(data)):
                    return data
            count = range_nbytes(where, offset, nbytes, self._size(path, deadline))
            data = self._cat(path, offset, count, deadline) if count else b""
            if len(data) != count:
                raise StoreError(f"{where}: cannot get: expected {count} bytes from {offset}, got {len(data)}")
            return data

    def _cat(self, path: str, offset: int, nbytes: int | None, deadline: float | None) -> bytes:
        # An open range is one request. The whole object would be two: its size is asked for first.
        asked = {"start": offset, "end": None if nbytes is None else offset + nbytes}
        try:
            return bytes(self._client.call("cat_file", path, **asked, nbytes=nbytes or PACK_NBYTES, deadline=deadline))
        except Exception as error:
            if is_behind_the_end(error) and offset >= self._size(path, deadline):
                return b""
            raise

    def _size(self, path: str, deadline: float | None) -> int:
        info = self._client.call("info", path, deadline=deadline)
        if info["type"] != "file":  # a prefix is not a file
            raise FileNotFoundError(path)
        return int(info["size"])

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        as_bytes(buffer)[:] = self._get(key, offset, buffer.nbytes, deadline)

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        directory = check_prefix(prefix).rpartition("/")[0]
        with self._client.failures("list", prefix):
            entries = self._listing.below(directory)
        found = {entry.key: entry for entry in entries if entry.key.startswith(prefix)}
        return [found[key] for key in sorted(found) if key > after]

    @override
    def peek(self, most: int) -> list[str]:
        """Lists the root's own level: below it may lie a million objects, and no page of a listing can be asked for."""
        with self._client.failures("list", ""):
            entries = self._listing.level()
        return sorted(entry.key for entry in entries)[:most]

    @override
    def delete(self, *keys: str) -> None:
        paths = [(key, self._path(key)) for key in keys]
        if len(paths) > 1 and self._client.is_object_store:  # another client may have one connection for all threads
            with ThreadPoolExecutor(DOCUMENT_THREADS, "ckptlib-delete") as threads:
                for _ in threads.map(self._delete, paths):
                    pass
        else:
            for path in paths:
                self._delete(path)

    def _delete(self, one: tuple[str, str]) -> None:
        key, path = one
        with self._client.failures("delete", key):
            try:
                self._client.call("rm_file", path)
            except ABSENT as error:
                if is_page(error):
                    raise

    def _path(self, key: str) -> str:
        return f"{self._client.root}/{check_key(key)}"


def _needs_size_first(nbytes: int | None) -> bool:
    """Whether to ask for the size first: no backend reads 0 bytes, some take memory for all that a document says."""
    return nbytes is not None and (nbytes == 0 or nbytes > PACK_NBYTES)
