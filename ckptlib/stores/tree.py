"""The directories and files below the root of a local store, each opened from the one above it.

No link is followed below the root: a name on a path may become a link between a listing and a deletion, and its target
is not ours. The root itself may be a link. What is reached through a link, or is no regular file, is no object; but a
link in the root, by which whole directories are moved to another disk, is refused in words: a root without its steps
would look like a new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence

from ckptlib.errors import StoreError

BY_PATH = not hasattr(os, "O_DIRECTORY")
"""Whether this is Windows: directories have no descriptors there. Roots are read, not written or deleted from."""

_DIRECTORY: int = 0 if BY_PATH else os.O_DIRECTORY | os.O_CLOEXEC

_PASS: int = getattr(os, "O_PATH", os.O_RDONLY) | _DIRECTORY
"""Flags to go through a directory, for which it need not be readable, and which costs a file server nothing."""

_LIST = os.O_RDONLY | _DIRECTORY

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def directory(root: str, names: Sequence[str], to_list: bool = False) -> Iterator[int]:
    """Yields a descriptor of the directory of these names below `root`: to go through, or also to list and flush.

    Raises OSError, also for what is no directory; StoreError for a link in the root, or if the root is a link that
    leads nowhere.
    """
    flags = _LIST if to_list else _PASS
    fd = _open_root(root, flags if not names else _PASS)
    try:
        for depth, name in enumerate(names, 1):
            outer, fd = fd, _enter(root, fd, name, depth, flags if depth == len(names) else _PASS)
            os.close(outer)
        yield fd
    finally:
        os.close(fd)


def make(root: str, names: Sequence[str]) -> None:
    """Makes the directory of these names, and those above it. Raises as `directory` does."""
    for depth, name in enumerate(names):
        with directory(root, names[:depth]) as fd, contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=fd)


def inner(fd: int, name: str) -> int:
    """Returns a descriptor, to be listed, of a directory in that of `fd`. Raises OSError, also for a link."""
    return _open(fd, name, _LIST)


def open_file(fd: int, name: str) -> tuple[int, os.stat_result]:
    """Opens a regular file to be read, and never waits for it; returns its descriptor and status. Raises OSError;
    NotAFile for anything else."""
    try:
        file = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
    except FileNotFoundError:
        raise
    except OSError:
        kind = kind_of(fd, name)  # a socket, or a link, cannot be opened
        if kind is None:
            raise
        raise NotAFile(kind) from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise NotAFile(_kind(found.st_mode))
    except OSError:
        os.close(file)
        raise
    return file, found


def open_by_path(path: str) -> tuple[int, os.stat_result]:
    """Does what `open_file` does, but follows links above the file."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise NotAFile(_kind(found.st_mode))
    return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)), found


class NotAFile(OSError):
    """Another kind of file is there under the name. Its argument names it."""


def kind_of(fd: int, name: str) -> str | None:
    """Returns the kind of file under a name, in words; None for a regular file, or if that cannot be told."""
    try:
        mode = os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode
    except OSError:
        return None
    return None if stat.S_ISREG(mode) else _kind(mode)


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def _open_root(root: str, flags: int) -> int:
    try:
        return os.open(root, flags)
    except FileNotFoundError as error:
        there = root
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        if os.path.exists(there):
            raise
        raise StoreError(  # a root that cannot be reached would look like one without steps
            f"{root} is not there: {there} is a symbolic link to {os.readlink(there)}, which leads nowhere; is its "
            "file system mounted? If so, make the directory that it leads to"
        ) from error


def _enter(root: str, fd: int, name: str, depth: int, flags: int) -> int:
    try:
        return _open(fd, name, flags)
    except NotADirectoryError as error:
        if depth > 1:
            raise
        if kind_of(fd, name) != _KINDS[stat.S_IFLNK]:
            raise NotADirectoryError(error.errno, error.strerror, f"{root}/{name}") from error
        raise StoreError(
            f"{root}/{name} is a symbolic link, and ckptlib does not follow links inside a root: the target may belong "
            "to another root, whose data would be deleted with this one's steps. To keep the root elsewhere, move all "
            f"of it and make {root} itself the link"
        ) from error


def _open(fd: int, name: str, flags: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, dir_fd=fd)
    except OSError as error:
        if error.errno != errno.ELOOP:  # what a link gives if there is no O_PATH
            raise
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name) from None
