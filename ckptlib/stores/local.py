"""Objects as files in a directory.

An object is written under a temporary name, flushed, and then linked under its key; a link never replaces a file.
A crash leaves at most a file in `.tmp`, which no listing shows: <pid>-<random>.

Large uploads of whole pages go around the page cache (O_DIRECT), so that a checkpoint does not push the data set out
of memory; file systems that refuse that are written through the cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator

import numpy as np
from typing_extensions import Buffer, override

from ckptlib.errors import ObjectExists, ObjectNotFound, StoreError, StoreFull
from ckptlib.stores.base import (
    Entry,
    Store,
    Upload,
    as_bytes,
    check_key,
    check_prefix,
    check_range,
    ends_early,
    is_key,
)

PAGE_NBYTES = 4096
"""Alignment of address, offset and length that direct I/O takes on every disk; some would do with 512."""

SLICE_NBYTES = 16 << 20
"""Bytes in one write call."""

TEMP_DIRECTORY = ".tmp"

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)
_NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_NO_DIRECTORY_FSYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_FULL = {errno.ENOSPC, errno.EDQUOT}

_PUBLISH_TRIES = 100
"""How often `delete` may remove the directory that a put has just made before the put gives up."""


class LocalStore(Store):
    """The files below `path`, which is made by the first put.

    A put is durable on return: the file and every directory from it up to the root are flushed. A delete is not
    flushed: after a power loss the object may be back. Symbolic links below the root are not objects.
    """

    def __init__(self, path: str) -> None:
        if not path:
            raise ValueError("a local store needs a path, got ''")
        self._root = os.path.abspath(path)
        self.url = "file://" + self._root
        self.pack_nbytes = 1 << 40

    @override
    def put(self, key: str, data: Buffer) -> None:
        with self.upload(key, 0) as upload:
            upload.write(data)
            upload.commit(b"")

    @override
    def upload(self, key: str, head_nbytes: int) -> Upload:
        return _LocalUpload(self._root, self._path(key), head_nbytes)

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        check_range(offset, nbytes)
        path = self._path(key)
        with _opened(path) as fd:
            count = _check_inside(fd, path, offset, nbytes)
            pieces = [os.pread(fd, count, offset)]
            done = len(pieces[0])
            while done < count:  # Linux reads at most 2 GiB at a time
                pieces.append(os.pread(fd, count - done, offset + done))
                if not pieces[-1]:
                    raise ends_early(path, offset, nbytes, offset + done)
                done += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        check_range(offset, buffer.nbytes)
        path = self._path(key)
        view = as_bytes(buffer)
        with _opened(path) as fd:
            _check_inside(fd, path, offset, buffer.nbytes)
            while view:
                count = os.preadv(fd, [view], offset)
                if count == 0:
                    raise ends_early(path, offset, view.nbytes, offset)
                view, offset = view[count:], offset + count

    @override
    def scan(self, prefix: str) -> list[Entry]:
        check_prefix(prefix)
        directory = prefix[: prefix.rfind("/") + 1]
        try:
            return sorted(self._walk(directory, prefix), key=lambda entry: entry.key)
        except OSError as error:
            raise _failure(error, "list", error.filename or os.path.join(self._root, directory)) from error

    def _walk(self, directory: str, prefix: str) -> Iterator[Entry]:
        try:
            with os.scandir(os.path.join(self._root, directory)) as found:
                children = list(found)
        except (FileNotFoundError, NotADirectoryError):
            return
        for child in children:
            key = directory + child.name
            if not key.startswith(prefix) or not is_key(key):
                continue
            if child.is_dir(follow_symlinks=False):
                yield from self._walk(key + "/", "")
            elif child.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted since the directory was read
                    status = child.stat(follow_symlinks=False)
                    yield Entry(key, status.st_size, status.st_mtime)

    @override
    def clean(self, before: float) -> None:
        directory = os.path.join(self._root, TEMP_DIRECTORY)
        try:
            with os.scandir(directory) as entries:
                old = [entry.path for entry in entries if entry.stat(follow_symlinks=False).st_mtime < before]
            for path in old:
                os.unlink(path)
        except FileNotFoundError:
            return  # nothing was ever written here, or another sweep was faster
        except OSError as error:
            raise _failure(error, "clean", directory) from error

    @override
    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            os.unlink(path)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise _failure(error, "delete", path) from error
        self._remove_empty_directories(os.path.dirname(path))

    def _remove_empty_directories(self, directory: str) -> None:
        with contextlib.suppress(OSError):  # not empty, most often; the object is gone, the rest is neatness
            while directory != self._root:
                os.rmdir(directory)
                directory = os.path.dirname(directory)

    def _path(self, key: str) -> str:
        return os.path.join(self._root, check_key(key))


class _LocalUpload(Upload):
    def __init__(self, root: str, path: str, head_nbytes: int) -> None:
        self._root, self._path, self._head_nbytes = root, path, head_nbytes
        self._end = head_nbytes
        self._direct_fd: int | None = None
        self._may_direct = _O_DIRECT != 0
        try:
            self._temp, self._fd = _open_temp(root)
        except OSError as error:
            raise _failure(error, "begin to write", path, head_nbytes) from error
        self._open = True

    @override
    def write(self, data: Buffer) -> None:
        self._check_open()
        view = as_bytes(data)
        try:
            done = self._write_direct(view) if self._may_direct else 0
            _write_all(self._fd, view[done:], self._end + done)
        except OSError as error:
            self.abort()
            raise _failure(error, "write", self._path, view.nbytes) from error
        self._end += view.nbytes

    def _write_direct(self, view: memoryview) -> int:
        """Writes the whole pages at the start of `view` past the page cache; returns how many bytes it wrote."""
        if self._end % PAGE_NBYTES or view.nbytes < PAGE_NBYTES or _address(view) % PAGE_NBYTES:
            return 0
        done, stop = 0, view.nbytes - view.nbytes % PAGE_NBYTES
        try:
            if self._direct_fd is None:
                self._direct_fd = os.open(self._temp, os.O_WRONLY | os.O_CLOEXEC | _O_DIRECT)
            while done < stop and done % PAGE_NBYTES == 0:  # a short write may end inside a page
                piece = view[done : min(done + SLICE_NBYTES, stop)]
                done += _checked(os.pwrite(self._direct_fd, piece, self._end + done))
        except OSError as error:
            if error.errno not in _NO_DIRECT:
                raise
            self._may_direct = False
        return done

    @override
    def commit(self, head: Buffer) -> None:
        self._check_open()
        view = as_bytes(head)
        if view.nbytes != self._head_nbytes:
            raise ValueError(f"{self._path}: a head of {self._head_nbytes} bytes was announced, got {view.nbytes}")
        try:
            _write_all(self._fd, view, 0)
            os.fsync(self._fd)
            _publish(self._temp, self._path)
            _sync_up(os.path.dirname(self._path), self._root)
        except OSError as error:
            raise _failure(error, "publish", self._path, self._end) from error
        finally:
            self.abort()

    @override
    def abort(self) -> None:
        if not self._open:
            return
        self._open = False
        for fd in (self._fd, self._direct_fd):
            if fd is not None:
                with contextlib.suppress(OSError):  # what was to be kept has been flushed
                    os.close(fd)
        with contextlib.suppress(OSError):  # published by a rename; or what stays is a file that nothing names
            os.unlink(self._temp)

    def _check_open(self) -> None:
        if not self._open:
            raise ValueError(f"{self._path}: this upload is over; begin another")


def _open_temp(root: str) -> tuple[str, int]:
    temp = os.path.join(root, TEMP_DIRECTORY, f"{os.getpid()}-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return temp, os.open(temp, flags, 0o666)
    except FileNotFoundError:
        _make_root(root)
    return temp, os.open(temp, flags, 0o666)


def _make_root(root: str) -> None:
    missing = []
    directory = root
    while not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    os.makedirs(os.path.join(root, TEMP_DIRECTORY), exist_ok=True)
    for directory in missing:
        _sync_directory(os.path.dirname(directory))


def _publish(temp: str, path: str) -> None:
    """Gives the finished file its name. Raises ObjectExists; nothing is ever replaced."""
    for tries_left in reversed(range(_PUBLISH_TRIES)):
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            _link(temp, path)
            break
        except (FileNotFoundError, FileExistsError):  # `delete` found a directory empty and removed it under us
            if not tries_left:
                raise
    with contextlib.suppress(OSError):  # before the directories are flushed: no crash leaves a second name
        os.unlink(temp)


def _link(temp: str, path: str) -> None:
    try:
        os.link(temp, path)
    except FileExistsError:
        # NFS sends a request again when the answer is lost; the second one finds the link of the first.
        if os.path.lexists(path) and os.path.samestat(os.lstat(temp), os.lstat(path)):
            return
        raise _exists(path) from None
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A put of the same key in the same moment would be replaced; keys are random enough that there is none.
        if os.path.lexists(path):
            raise _exists(path) from None
        os.rename(temp, path)


def _exists(path: str) -> ObjectExists:
    return ObjectExists(f"{path}: exists already, and objects are never overwritten; put it under another key")


def _sync_up(directory: str, root: str) -> None:
    """Flushes `directory` and those above it up to `root`.

    All of them every time: another process may have made one of them a moment ago and not have flushed it yet.
    """
    _sync_directory(directory)
    while directory != root:
        directory = os.path.dirname(directory)
        _sync_directory(directory)


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(fd)


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = _checked(os.pwrite(fd, view[:SLICE_NBYTES], offset))
        view, offset = view[count:], offset + count


def _checked(count: int) -> int:
    if count == 0:  # would be tried for ever
        raise OSError(errno.EIO, "the file system wrote nothing and gave no reason")
    return count


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """A descriptor to read from; errors inside become those of the contract."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in _ABSENT:
            raise ObjectNotFound(f"{path}: no such object") from None
        raise _failure(error, "read", path) from error


def _check_inside(fd: int, path: str, offset: int, nbytes: int | None) -> int:
    """The length of the range; looked up before memory is taken for it, since ranges come from documents."""
    size = os.fstat(fd).st_size
    if offset + (nbytes or 0) > size:
        raise ends_early(path, offset, nbytes, size)
    return size - offset if nbytes is None else nbytes


def _failure(error: OSError, doing: str, path: str, nbytes: int = 0) -> StoreError:
    cause = f"{os.strerror(error.errno)} (errno {error.errno})" if error.errno else str(error)
    if error.errno in _FULL:
        return StoreFull(f"{path}: cannot {doing} {nbytes} bytes: {cause}; {_free(path)}; make room and try again")
    return StoreError(f"{path}: cannot {doing}: {cause}")


def _free(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    try:
        status = os.statvfs(path)
    except OSError:
        return "how much is free cannot be told"
    return f"{status.f_bavail * status.f_frsize} bytes are free on its file system"
