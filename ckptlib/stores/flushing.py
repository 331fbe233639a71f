"""Makes files and their names durable, and knows the errors of a file system that cannot do what it is asked.

Some file systems can flush no directory, count no bytes, or give no room beforehand: there names are as durable as the
file system makes them, and nothing is refused. A file whose own bytes cannot be flushed is an error everywhere.
"""

from __future__ import annotations

import errno
import os
import stat

CANNOT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP}
"""Errors by which file systems say so, of direct I/O as well."""


def flush_names(fd: int) -> None:
    """Flushes the names in the directory of this descriptor."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in CANNOT:
            raise


def flush_path(path: str | os.PathLike[str]) -> None:
    """Flushes a file, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            flush_names(fd)
        else:
            os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: str) -> None:
    """Makes a directory, and those above it; the names of all that were not there are flushed."""
    missing = []
    directory = os.path.abspath(path)
    while not os.path.isdir(directory):
        missing.append(directory)
        directory = os.path.dirname(directory)
    os.makedirs(path, exist_ok=True)
    for directory in missing:
        flush_path(os.path.dirname(directory))


def reserve(fd: int, nbytes: int) -> None:
    """Takes the room for a file. If a file system cannot, or on macOS, a full disk is met later, by a write."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in CANNOT:
            raise


def free_nbytes(path: str) -> int | None:
    """Returns how many bytes more there is room for; None if nobody counts them, as in ramfs. Raises OSError."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize if found.f_blocks else None
