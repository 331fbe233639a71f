"""Makes an object a file of a local store.

It is written under a temporary name, flushed, and then linked under its key; a link never replaces a file. A crash
leaves at most a file in `.tmp`, which no listing shows: <pid>-<random>.

Large uploads of whole pages go around the page cache (O_DIRECT), so that a checkpoint does not push the data set out
of memory; file systems that refuse that are written through the cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Sequence

from typing_extensions import Buffer, Self

from ckptlib.errors import CkptError, FormatError, StoreError
from ckptlib.pages import PAGE_BYTES
from ckptlib.stores import tree
from ckptlib.stores.base import as_bytes, taken
from ckptlib.stores.flushing import CANNOT, flush_names, make_directories
from ckptlib.stores.local_direct import O_DIRECT, address_of, written
from ckptlib.stores.local_errors import failure

SLICE_NBYTES = 16 << 20
"""Bytes in one write call."""

TEMP_DIRECTORY = ".tmp"
TEMP_NAME = re.compile(r"[0-9]+-[0-9a-f]{16}")

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
"""Errors by which file systems refuse links. AFS has EXDEV for a link from one directory to another; to another disk,
no rename works either."""

_PUBLISH_TRIES = 100
"""How often a put tries again if `delete` removes the directory that it has just made."""


class LocalUpload:
    """One file below `root` that has no key yet: a head of a size fixed beforehand, and a body in order.

    Nothing has the key until `commit` returns. Leaving the context without a commit leaves nothing behind.
    """

    def __init__(self, root: str, key: str, head_nbytes: int) -> None:
        self._root, self._key = root, key
        self._path = os.path.join(root, key)
        self._end = head_nbytes
        self._direct_fd: int | None = None
        self._may_direct = O_DIRECT != 0
        try:
            self._temp, self._fd = _open_temp(root)
        except OSError as error:
            raise failure(error, "begin to write", self._path, head_nbytes) from error
        self._open = True

    def write(self, data: Buffer) -> None:
        """Appends to the body; the file has it when this returns."""
        view = as_bytes(data)
        try:
            done = self._write_direct(view) if self._may_direct else 0
            _write_all(self._fd, view[done:], self._end + done)
        except OSError as error:
            self.abort()
            raise failure(error, "write", self._path, view.nbytes) from error
        self._end += view.nbytes

    def _write_direct(self, view: memoryview) -> int:
        """Writes the whole pages at the start of `view` past the page cache; returns how many bytes it wrote."""
        if self._end % PAGE_BYTES or view.nbytes < PAGE_BYTES or address_of(view) % PAGE_BYTES:
            return 0
        done, stop = 0, view.nbytes - view.nbytes % PAGE_BYTES
        try:
            if self._direct_fd is None:
                with tree.directory(self._root, [TEMP_DIRECTORY]) as fd:
                    flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | O_DIRECT
                    self._direct_fd = os.open(self._temp, flags, dir_fd=fd)
            while done < stop and done % PAGE_BYTES == 0:  # a short write may end inside a page
                piece = view[done : min(done + SLICE_NBYTES, stop)]
                done += written(os.pwrite(self._direct_fd, piece, self._end + done))
        except OSError as error:
            if error.errno not in CANNOT:
                raise
            self._may_direct = False
        return done

    def commit(self, head: memoryview) -> None:
        """Puts `head`, of exactly the size announced, before the body, and publishes the file.

        Raises ObjectExists, FormatError, StoreFull, StoreError. If the directories cannot be flushed, the object has
        its name all the same: others may have seen it, flushed it, and told that it is saved.
        """
        try:
            _write_all(self._fd, head, 0)
            os.fsync(self._fd)
            _publish(self._root, self._temp, self._key, os.fstat(self._fd))
            with contextlib.suppress(OSError):
                os.utime(self._fd)  # by its time a committer tells when it came, and a flush may hang for long
        except OSError as error:
            raise failure(error, "publish", self._path, self._end) from error
        finally:
            self.abort()
        try:
            sync_up(self._root, self._key.split("/")[:-1])
        except (OSError, StoreError) as error:
            cause = failure(error, "flush", self._path, self._end) if isinstance(error, OSError) else error
            raise type(cause)(f"{cause}. The object is there, but a power loss may take it") from error

    def abort(self) -> None:
        """Drops the written bytes. Does nothing after a commit."""
        if not self._open:
            return
        self._open = False
        for fd in (self._fd, self._direct_fd):
            if fd is not None:
                with contextlib.suppress(OSError):  # what was to be kept has been flushed
                    os.close(fd)
        _unlink_temp(self._root, self._temp)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


def _open_temp(root: str) -> tuple[str, int]:
    """Makes a file in the directory for temporary ones; returns its name, and a descriptor to write to it."""
    name = f"{os.getpid()}-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with tree.directory(root, [TEMP_DIRECTORY]) as fd:
            return name, os.open(name, flags, 0o666, dir_fd=fd)
    except FileNotFoundError:
        _make_root(root)
    with tree.directory(root, [TEMP_DIRECTORY]) as fd:
        return name, os.open(name, flags, 0o666, dir_fd=fd)


def _unlink_temp(root: str, name: str) -> None:
    """Removes a temporary file. If that fails, it stays, and nothing names it; one that was renamed is not there."""
    with contextlib.suppress(OSError, StoreError), tree.directory(root, [TEMP_DIRECTORY]) as fd:
        os.unlink(name, dir_fd=fd)


def _make_root(root: str) -> None:
    make_directories(root)
    tree.make(root, [TEMP_DIRECTORY])


def _publish(root: str, temp: str, key: str, own: os.stat_result) -> None:
    """Gives the finished file, which is `own`, its name. Raises ObjectExists; nothing is ever replaced."""
    *names, name = key.split("/")
    for tries_left in reversed(range(_PUBLISH_TRIES)):
        try:
            with tree.directory(root, [TEMP_DIRECTORY]) as source, tree.directory(root, names) as target:
                _name(source, temp, target, name, f"{root}/{key}", own)
            break
        except FileNotFoundError:  # a new directory; or `delete` found one empty and removed it under us
            if not tries_left:
                raise
            with contextlib.suppress(FileNotFoundError):
                tree.make(root, names)
    _unlink_temp(root, temp)  # before the directories are flushed: no crash leaves a second name


def _name(source: int, temp: str, target: int, name: str, path: str, own: os.stat_result) -> None:
    """Gives the file its name. `source` and `target`: descriptors of directories. `path`: for messages.

    An error may be the answer to a request that was carried out: NFS sends one again when the answer is lost, and the
    second one finds the link of the first, or no file to rename any more; or nobody answers in time. So if the name is
    of this very file, it has been given.
    """
    try:
        os.link(temp, name, src_dir_fd=source, dst_dir_fd=target, follow_symlinks=False)
    except OSError as error:
        if _is_own(target, name, own):
            return
        if isinstance(error, FileExistsError):
            raise _taken(target, name, path) from None
        if error.errno not in _NO_LINKS:
            raise
        _rename(source, temp, target, name, path, own)


def _rename(source: int, temp: str, target: int, name: str, path: str, own: os.stat_result) -> None:
    # A put of the same key in the same moment would be replaced; keys are random enough that there is none.
    if _status(target, name) is not None:
        raise _taken(target, name, path) from None
    try:
        os.rename(temp, name, src_dir_fd=source, dst_dir_fd=target)
    except OSError:
        if not _is_own(target, name, own):
            raise


def _is_own(fd: int, name: str, own: os.stat_result) -> bool:
    found = _status(fd, name)
    return found is not None and os.path.samestat(found, own)


def _status(fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _taken(fd: int, name: str, path: str) -> CkptError:
    """Returns the error for a name that is taken. Only an object counts as put before: who finds one there takes it for
    its own."""
    kind = tree.kind_of(fd, name)
    if kind is not None:
        return FormatError(f"{path}: cannot publish: {kind} is in the place of the object; remove it")
    return taken(path)


def sync_up(root: str, names: Sequence[str]) -> None:
    """Makes durable what lies directly in the directory of these names below `root`. Raises as `tree.directory`."""
    for depth in range(len(names), -1, -1):  # all, each time: others may have made one, and not have flushed it yet
        with tree.directory(root, names[:depth], to_list=True) as fd:
            flush_names(fd)


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = written(os.pwrite(fd, view[:SLICE_NBYTES], offset))
        view, offset = view[count:], offset + count
