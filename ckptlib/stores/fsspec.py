"""Objects behind any URL that fsspec knows: S3, GCS, Azure, SFTP, ...

The only place where fsspec is used, since it has traps:

* `open(url, "wb")` publishes what was written when an exception leaves the block. Objects are put whole by `pipe_file`.
* Listings are cached, and `walk` takes an error for an empty directory. Both are off here.
* Instances are shared by everybody who gives equal arguments. Ours are our own.

A key that is put twice is overwritten: S3 can refuse that, but then a request sent again because its answer was lost
is refused as well. ckptlib's keys carry a random part, and if they do not, every writer puts the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem
from typing_extensions import Buffer, override

from ckptlib.errors import CkptError, ObjectNotFound, ObjectUnreadable, StoreDenied, StoreError, StoreFull, StoreTimeout
from ckptlib.stores.base import (
    Entry,
    LateHead,
    Store,
    as_bytes,
    check_key,
    check_prefix,
    check_range,
    is_key,
    joined,
    range_nbytes,
)
from ckptlib.stores.bounded import in_thread, on_loop
from ckptlib.stores.fsspec_errors import concerns_all, is_behind_the_end, is_forbidden, is_page, may_pass
from ckptlib.stores.gcs_answers import DEFAULTS, refuse_pages
from ckptlib.stores.io_limits import DOCUMENT_THREADS, IDLE_S, RETRY_S, SLOWEST_BPS
from ckptlib.stores.retries import Retries
from ckptlib.stores.secrets import Secrets, without_userinfo

PACK_NBYTES = 64 << 20
"""Most bytes of a pack: several objects at a time are held in memory until they are put. Large enough that the time of
a request does not matter."""

LISTING_NBYTES = 50_000_000
"""A listing may take as long as this many bytes: nothing is seen of it before its last page."""

_LISTING_TRIES = 10
_MODIFIED = ("LastModified", "last_modified", "updated", "mtime", "created")
_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_ONE_CONNECTION = ("sftp", "ssh", "ftp")  # their client mixes up answers to calls of several threads


class FsspecStore(Store):
    """The objects below `url`; `options` are those of fsspec's filesystem.

    It is as atomic and as durable as the backend's `pipe_file`: on object stores an object appears whole or not at all;
    on SFTP and its like a crash in the middle of a put leaves a torn file.

    A request that takes too long is given up and sent again. If the backend cannot be interrupted, what was given up
    may still be carried out: an object may appear after its put has failed. Its key is random, or its bytes are always
    the same, so that nothing is harmed.
    """

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url = without_userinfo(url).rstrip("/")
        self.pack_nbytes, self.late_nbytes = PACK_NBYTES, PACK_NBYTES // 2
        self._secrets = Secrets(url, options)
        try:
            fs, root = _filesystem_of(url, options)
        except OSError as error:  # FTP and SFTP connect here
            told = self._secrets.hide(f"{type(error).__name__}: {error}")
            raise StoreTimeout(f"{self.url}: cannot be reached: {told}") from self._secrets.harmless(error)
        fs.dircache.use_listings_cache = False  # the argument of that name is refused by some filesystems (SFTP)
        self._fs: Any = fs
        self._root = str(root).rstrip("/")
        self._lists_flat = _lists_flat(fs)
        self._turns = threading.Semaphore(1 if url.partition("://")[0] in _ONE_CONNECTION else 10**6)
        self._was_there = False
        """Whether the server has answered."""

    def _call(self, name: str, *args: Any, nbytes: int = 0, deadline: float | None = None, **kwargs: Any) -> Any:
        """Calls a method of the filesystem that moves `nbytes` bytes. Calls it again if it takes too long, or if the
        backend takes for a refusal what may pass.

        However long the first try took, another one follows. Raises its errors, and StoreTimeout.
        """
        began = time.monotonic()
        end = until = math.inf if deadline is None else deadline
        limit_s = IDLE_S + nbytes / SLOWEST_BPS
        again = Retries(deadline)
        while True:
            tried = time.monotonic()
            try:
                found = self._attempt(name, limit_s, end, *args, **kwargs)
                self._was_there = True
                return found
            except TimeoutError:
                now = time.monotonic()
                until = min(until, now + RETRY_S)
                if now >= until:
                    raise StoreTimeout(f"no answer within {now - began:.0f} s, for {nbytes} bytes") from None
                time.sleep(max(0.0, min(1.0, tried + limit_s - now)))  # the backend itself may be in a hurry
            except Exception as error:
                wait_s = again.wait_s() if may_pass(error) else None
                if wait_s is None:
                    raise
                time.sleep(wait_s)

    def _attempt(self, name: str, limit_s: float, end: float, /, *args: Any, **kwargs: Any) -> Any:
        """Makes one call. Raises TimeoutError, and the method's errors."""
        left_s = max(end - time.monotonic(), 0.0)
        coroutine = getattr(self._fs, f"_{name}", None) if self._fs.async_impl else None
        if inspect.iscoroutinefunction(coroutine):
            return on_loop(partial(coroutine, *args, **kwargs), self._fs.loop, min(limit_s, left_s))
        if not self._turns.acquire(timeout=min(RETRY_S, left_s)):
            raise TimeoutError
        try:
            left_s = max(end - time.monotonic(), 0.0)
            return in_thread(partial(getattr(self._fs, name), *args, **kwargs), min(limit_s, left_s))
        finally:
            self._turns.release()

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
        pipe = partial(self._call, "pipe_file", path, body, nbytes=len(body), deadline=deadline)
        with self._failures("put", key, len(body)):
            try:
                pipe()
            except FileNotFoundError:
                if self._fs.async_impl:  # an object store has no directories to miss
                    raise NoBucket("no such bucket") from None
                self._put_anew(key, pipe, deadline)

    def _put_anew(self, key: str, pipe: Callable[[], object], deadline: float | None) -> None:
        """Makes the directory, and puts again. Other ranks may make it as well: some backends then say that they cannot
        make it, at each level of the path, and by no error of its own."""
        directory = self._path(key).rpartition("/")[0]
        for levels in reversed(range(key.count("/") + 1)):
            failure: OSError | None = None
            try:
                self._call("makedirs", directory, exist_ok=True, deadline=deadline)
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
        with self._failures("get", key):
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
        end = None if nbytes is None else offset + nbytes
        try:
            # An open range is one request. The whole object would be two: its size is asked for first.
            read = self._call("cat_file", path, start=offset, end=end, nbytes=nbytes or PACK_NBYTES, deadline=deadline)
            return bytes(read)
        except Exception as error:
            if is_behind_the_end(error) and offset >= self._size(path, deadline):
                return b""
            raise

    def _size(self, path: str, deadline: float | None) -> int:
        info = self._call("info", path, deadline=deadline)
        if info["type"] != "file":  # a prefix is not a file
            raise FileNotFoundError(path)
        return int(info["size"])

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        as_bytes(buffer)[:] = self._get(key, offset, buffer.nbytes, deadline)

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        directory = check_prefix(prefix).rpartition("/")[0]
        path = f"{self._root}/{directory}".rstrip("/")
        with self._failures("list", prefix):
            self._fs.invalidate_cache()
            entries = [self._entry(info) for info in self._below(path) if info["type"] == "file"]
        found = {entry.key: entry for entry in entries if entry.key.startswith(prefix) and is_key(entry.key)}
        return [found[key] for key in sorted(found) if key > after]

    @override
    def peek(self, most: int) -> list[str]:
        """Lists the root's own level: below it may lie a million objects, and no page of a listing can be asked for."""
        with self._failures("list", ""):
            self._fs.invalidate_cache()
            entries = [self._entry(info) for info in self._list(self._root) if info["type"] == "file"]
        return sorted(entry.key for entry in entries if is_key(entry.key))[:most]

    def _below(self, path: str) -> Iterable[dict[str, Any]]:
        """Returns every file. If one listing takes too long, as of some hundred thousand, each directory has one."""
        if self._lists_flat:
            self._check_there()
            with contextlib.suppress(StoreTimeout):
                return self._find(path)
        return self._walk(path)

    def _check_there(self) -> None:
        """Raises StoreTimeout if nobody answers: of a wrong address, the listings would take four minutes to tell. Asks
        for a byte of an object: if one may not ask for the bucket itself, gcsfs lists all that lies in it."""
        if not self._was_there:
            try:
                self._call("cat_file", self._path("ckptlib.json"), start=0, end=1)
            except StoreTimeout:
                raise
            except Exception:  # it answered; the listing tells what is wrong
                self._was_there = True

    def _find(self, path: str) -> list[dict[str, Any]]:
        try:
            found = self._call("find", path, detail=True, nbytes=LISTING_NBYTES)
        except FileNotFoundError:
            found = {}
        if not found and self._fs.async_impl and not self._call("exists", path.lstrip("/").partition("/")[0]):
            raise NoBucket("no such bucket")  # some backends find nothing there, and raise nothing
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
                return list(self._call("ls", path, detail=True, nbytes=LISTING_NBYTES))
            except _ABSENT:  # the directory, or a file that was deleted while its directory was listed
                try:
                    if self._call("info", path)["type"] != "directory":
                        return []
                except _ABSENT:
                    return []
        raise OSError(errno.EAGAIN, f"files vanished during each of {_LISTING_TRIES} listings of {path}")

    def _entry(self, info: Mapping[str, Any]) -> Entry:
        if (size := info["size"]) is None:
            raise StoreError(f"{info['name']} is listed without a size, as by web pages; copy it to a path or a bucket")
        return Entry(str(info["name"]).removeprefix(self._root).removeprefix("/"), int(size), _modified(info))

    @override
    def delete(self, *keys: str) -> None:
        paths = [(key, self._path(key)) for key in keys]
        if len(paths) > 1 and self._fs.async_impl:  # another client may have one connection for all threads
            with ThreadPoolExecutor(DOCUMENT_THREADS, "ckptlib-delete") as threads:
                for _ in threads.map(self._delete, paths):
                    pass
        else:
            for path in paths:
                self._delete(path)

    def _delete(self, one: tuple[str, str]) -> None:
        key, path = one
        with self._failures("delete", key):
            try:
                self._call("rm_file", path)
            except _ABSENT as error:
                if is_page(error):
                    raise

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    @contextlib.contextmanager
    def _failures(self, doing: str, key: str, nbytes: int = 0) -> Iterator[None]:
        """Turns errors of the backend into those of the contract, whatever tree they belong to.

        botocore, google, azure and paramiko each have their own, and none of them need be installed.
        """
        try:
            yield
        except StoreTimeout as error:
            why = "" if self._was_there else ", or not at this address: check the URL, the endpoint or account, and DNS"
            raise StoreTimeout(
                f"{self.url}/{key}: cannot {doing}: {error}; the store may be down, or too slow{why}"
            ) from None
        except CkptError:
            raise
        except _ABSENT as error:
            if doing == "get" and not is_page(error):
                raise ObjectNotFound(f"{self.url}/{key}: no such object") from None
            raise self._failure(error, doing, key) from self._secrets.harmless(error)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(f"{self.url}/{key}: cannot put {nbytes} bytes: {os.strerror(error.errno)}") from None
            raise self._failure(error, doing, key) from self._secrets.harmless(error)

    def _failure(self, error: Exception, doing: str, key: str) -> StoreError:
        cause = self._secrets.hide(f"{type(error).__name__}: {error}")
        kind: type[StoreError] = StoreError
        if isinstance(error, NoBucket):
            return StoreDenied(f"{self.url}/{key}: cannot {doing}: {cause}; make it, or correct the URL")
        if is_page(error):
            kind, cause = StoreTimeout, f"{cause}; is there a proxy in the way?"
        elif is_forbidden(error):
            kind = ObjectUnreadable if doing == "get" and not concerns_all(error) else StoreDenied
            cause += "; check the credentials, and what they may do there"
        return kind(f"{self.url}/{key}: cannot {doing}: {cause}")


class NoBucket(Exception):
    """The bucket or directory of the URL does not exist."""


def _needs_size_first(nbytes: int | None) -> bool:
    """Whether to ask for the size first: no backend reads 0 bytes, some take memory for all that a document says."""
    return nbytes is not None and (nbytes == 0 or nbytes > PACK_NBYTES)


_EXTRAS = {"gs": "gcs", "gcs": "gcs", **dict.fromkeys(("az", "abfs", "abfss"), "azure")}  # by scheme


def _filesystem_of(url: str, options: Mapping[str, object]) -> tuple[Any, str]:
    """Returns a filesystem of its own, and the path in it. Raises ValueError for one that cannot be used."""
    scheme = url.partition("://")[0]
    try:
        fs, root = fsspec.core.url_to_fs(url, **{**DEFAULTS.get(scheme, {}), **options, "skip_instance_cache": True})
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        if extra is None:
            raise
        raise ImportError(f"{scheme}:// needs a package: pip install 'ckptlib[{extra}]' ({error})") from error
    except (KeyError, TypeError, AttributeError, *_ABSENT) as error:  # gcsfs reads a file of other credentials
        told = Secrets(url, options).hide(f"{type(error).__name__}: {error}")
        raise ValueError(f"the filesystem for {scheme}:// lacks an option, or what one names: {told}") from None
    except ValueError as error:
        if "Protocol not known" not in str(error):
            raise
        raise ValueError(
            f"fsspec has no filesystem for {scheme}://; expected a path, or a URL such as s3://bucket/run7, "
            "gs://bucket/run7 or az://container/run7"
        ) from None
    if not hasattr(fs.dircache, "use_listings_cache"):  # Hugging Face's has a dict of its own
        raise ValueError(
            f"the filesystem for {scheme}://, {type(fs).__name__}, keeps what it has listed, which cannot be switched "
            "off; ckptlib needs fresh listings. Copy the files to a path or a bucket, and give that"
        )
    if scheme in DEFAULTS:
        refuse_pages(fs)
    return fs, root


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
