"""Objects as files in a directory: how they are read, listed and deleted. `local_upload` writes them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from typing_extensions import Buffer, override

from ckptlib.errors import ObjectNotFound, StoreError
from ckptlib.stores import tree
from ckptlib.stores.base import (
    Entry,
    LateHead,
    Store,
    as_bytes,
    check_key,
    check_prefix,
    check_range,
    ends_early,
    is_key,
    range_nbytes,
)
from ckptlib.stores.flushing import free_nbytes
from ckptlib.stores.local_direct import read_past_cache
from ckptlib.stores.local_errors import ABSENT, failure
from ckptlib.stores.local_upload import TEMP_DIRECTORY, TEMP_NAME, LocalUpload, sync_up

LATE_NBYTES = 28 * 1024 * 1024
"""Most bytes of an object with a late head: a small file is flushed while the next one is made; a large one, only after
all of it is."""


class LocalStore(Store):
    """The files below `path`, which is made by the first put.

    A put is durable on return: the file and every directory from it up to the root are flushed. A delete is not
    flushed: after a power loss the object may be back.

    Regular files are objects; links, FIFOs, sockets and devices are not, and nothing is looked for behind a link below
    the root. A link in the root itself is an error in every call that leads through it.
    """

    def __init__(self, path: str) -> None:
        if not path:
            raise ValueError("the URL of the root is empty, where it needs a path: is a variable in it not set?")
        self._root = os.path.abspath(path)
        self.url = "file://" + self._root
        self.pack_nbytes, self.late_nbytes = 1 << 40, LATE_NBYTES
        self.is_local = True

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
        late = LateHead.of(head)
        with LocalUpload(self._root, check_key(key), late.nbytes) as upload:
            for piece in pieces:
                upload.write(piece)
            upload.commit(late.made(key))

    @override
    def get(self, key: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        check_range(offset, nbytes)
        path = self._path(key)
        with _opened(self._root, key) as (fd, size):
            count = range_nbytes(path, offset, nbytes, size)
            pieces = [_read(fd, count, offset)]
            done = len(pieces[0])
            while done < count:  # Linux reads at most 2 GiB at a time
                pieces.append(_read(fd, count - done, offset + done))
                if not pieces[-1]:
                    raise ends_early(path, offset, nbytes, offset + done)
                done += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        check_range(offset, buffer.nbytes)
        path = self._path(key)
        view = as_bytes(buffer)
        with _opened(self._root, key) as (fd, size):
            range_nbytes(path, offset, buffer.nbytes, size)
            done = read_past_cache(fd, view, offset) if self.reads_once else 0
            view, offset = view[done:], offset + done
            while view:
                count = _read_into(fd, view, offset)
                if count == 0:
                    raise ends_early(path, offset, view.nbytes, offset)
                view, offset = view[count:], offset + count

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        return self._scan(check_prefix(prefix), after)

    @override
    def flush(self, prefix: str) -> None:
        names = check_prefix(prefix).split("/")[:-1]
        try:
            sync_up(self._root, names)
        except OSError as error:
            raise failure(error, "flush", os.path.join(self._root, prefix)) from error

    @override
    def peek(self, most: int) -> list[str]:
        try:
            with os.scandir(self._root) as found:
                return sorted(entry.name for entry in islice(found, most) if entry.is_file())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise failure(error, "list", self._root) from error

    def _scan(self, prefix: str, after: str) -> list[Entry]:
        directory = prefix[: prefix.rfind("/") + 1]
        try:
            if tree.BY_PATH:
                return sorted(self._walk(None, directory, prefix, after), key=lambda entry: entry.key)
            with tree.directory(self._root, directory.split("/")[:-1], to_list=True) as fd:
                return sorted(self._walk(fd, directory, prefix, after), key=lambda entry: entry.key)
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno == errno.ENOTDIR and os.path.dirname(error.filename) != self._root:
                return []  # no root, or below a directory of the root; one of those must not look empty
            raise failure(error, "list", os.path.join(self._root, directory)) from error

    def _walk(self, fd: int | None, directory: str, prefix: str, after: str) -> Iterator[Entry]:
        """Yields the objects below a directory. `fd`: its descriptor; None if there are only paths. Files and
        directories up to `after` cost no more than their names: asking for the size and time of each, or opening it, is
        a request of its own on a shared file system."""
        with os.scandir(os.path.join(self._root, directory) if fd is None else fd) as found:
            children = list(found)
        for child in children:
            key = directory + child.name
            is_dir = child.is_dir(follow_symlinks=False)
            inner = key + "/"
            is_behind = inner > after or after.startswith(inner) if is_dir else key > after
            if not is_behind or not key.startswith(prefix) or not is_key(key):
                continue
            if is_dir:
                yield from self._walk_inner(fd, child.name, inner, after)
            elif child.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # deleted since the directory was read
                    status = child.stat(follow_symlinks=False)
                    yield Entry(key, status.st_size, status.st_mtime)

    def _walk_inner(self, fd: int | None, name: str, directory: str, after: str) -> Iterator[Entry]:
        try:
            if fd is None:
                yield from self._walk(None, directory, "", after)
                return
            inner = tree.inner(fd, name)
            try:
                yield from self._walk(inner, directory, "", after)
            finally:
                os.close(inner)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise failure(error, "list", os.path.join(self._root, directory)) from error

    @override
    def free_nbytes(self) -> int | None:
        try:
            return free_nbytes(self._root)
        except OSError:
            return None

    @override
    def clean(self, before: float, is_ours: Callable[[str], bool]) -> None:
        """Removes only regular files with a name of ours, which tells no key: other files belong to somebody else. One
        that cannot be removed, as of another user, keeps none of the others; the first such error is raised last."""
        path = os.path.join(self._root, TEMP_DIRECTORY)
        failed: StoreError | None = None
        try:
            with tree.directory(self._root, [TEMP_DIRECTORY], to_list=True) as fd:
                for name in filter(TEMP_NAME.fullmatch, sorted(os.listdir(fd))):
                    try:
                        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                        if stat.S_ISREG(status.st_mode) and status.st_mtime < before:
                            os.unlink(name, dir_fd=fd)
                    except FileNotFoundError:  # another sweep was faster
                        pass
                    except OSError as error:
                        failed = failed or failure(error, "clean", os.path.join(path, name))
        except FileNotFoundError:
            return  # nothing was ever written here
        except OSError as error:
            raise failure(error, "clean", path) from error
        if failed is not None:
            raise failed

    @override
    def delete(self, *keys: str) -> None:
        for key in [*map(check_key, keys)]:
            self._delete(key)

    def _delete(self, key: str) -> None:
        path = self._path(key)
        *names, name = key.split("/")
        try:
            with tree.directory(self._root, names) as fd:
                os.unlink(name, dir_fd=fd)
        except OSError as error:
            if error.errno not in ABSENT:
                raise failure(error, "delete", path) from error
        self._remove_empty_directories(names)

    def _remove_empty_directories(self, names: list[str]) -> None:
        with contextlib.suppress(OSError):  # not empty, most often; the object is gone, the rest is neatness
            while names:
                *names, name = names
                with tree.directory(self._root, names) as fd:
                    os.rmdir(name, dir_fd=fd)

    def _path(self, key: str) -> str:
        return os.path.join(self._root, check_key(key))


def _read(fd: int, nbytes: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(fd, nbytes, offset)
    os.lseek(fd, offset, os.SEEK_SET)  # Windows; nobody else has this descriptor
    return os.read(fd, nbytes)


def _read_into(fd: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    with open(fd, "rb", buffering=0, closefd=False) as file:  # Windows, macOS
        file.seek(offset)
        return file.readinto(view) or 0


@contextlib.contextmanager
def _opened(root: str, key: str) -> Iterator[tuple[int, int]]:
    """Opens an object. Yields a descriptor to read from, and its size; turns errors inside into the contract's."""
    path = f"{root}/{key}"
    *names, name = key.split("/")
    try:
        if tree.BY_PATH:
            fd, status = tree.open_by_path(path)
        else:
            with tree.directory(root, names) as directory:
                fd, status = tree.open_file(directory, name)
        try:
            yield fd, status.st_size
        finally:
            os.close(fd)
    except tree.NotAFile as error:
        raise ObjectNotFound(f"{path}: no such object; {error} is in its place") from None
    except OSError as error:
        if error.errno in ABSENT:
            raise ObjectNotFound(f"{path}: no such object") from None
        raise failure(error, "read", path) from error
