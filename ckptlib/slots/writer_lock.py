"""A file beside the slots for each writer, which tells the next job that the writer has orders yet to read.

A slot tells by its lock that a writer reads it. A writer that is still starting, or that waits for a core, has locked
none, and once it has read its orders it commits a step all the same. So the trainer makes a file as it starts a writer,
and locks it twice:

    flock          It belongs to the open file, which the writer inherits, so it outlives the trainer. The writer gives
                   it up when no more orders can come and every slot that it was told to persist is locked.
    record lock    It belongs to the trainer's process and goes with it: the writer of a live trainer is not waited for.

Nobody else keeps the flock: other programs that the trainer starts do not inherit the file, and a forked child closes
it. No torch.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from typing_extensions import Self

with suppress(ImportError):  # on Windows, where this module is only imported
    import fcntl

log = logging.getLogger(__name__)

SUFFIX = ".writer"

_own: dict[Path, WriterLock] = {}
"""Locks of this process's writers. It never opens their files again: closing a second descriptor would drop the record
lock."""


class WriterLock:
    """One such file: the trainer's end, or its writer's."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def take(cls, directories: Sequence[Path], prefix: str) -> Self | None:
        """Makes a lock, for the trainer, in the first of these directories where that is possible.

        Returns None, with a warning, if it is possible in none of them: the job runs, but its successor does not see a
        writer that is late.
        """
        for directory in directories:
            try:
                lock = cls._take_in(directory, prefix)
            except OSError as error:
                log.warning("cannot make a file for the writer's lock in %s: %s", directory, error.strerror)
                continue
            _own[lock.path] = lock
            return lock
        return None

    @classmethod
    def _take_in(cls, directory: Path, prefix: str) -> Self:
        while True:
            path = directory / f"{prefix}-{secrets.token_hex(8)}{SUFFIX}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(fd).st_nlink:
                    return cls(path, fd)
            except BlockingIOError:
                pass  # a job that looks around found it before it was locked
            except OSError:
                os.close(fd)
                _remove(path)
                raise
            os.close(fd)
            _remove(path)

    def release(self) -> None:
        """Gives up the lock, in the writer: the successor of its job need not wait for it any more. Called once."""
        _remove(self.path)
        fcntl.flock(self.fd, fcntl.LOCK_UN)  # for whoever else has the file open, too
        os.close(self.fd)

    def close(self) -> None:
        """Closes the file, in the trainer, which has no more orders: from here on its writer is left to itself."""
        if _own.pop(self.path, None) is not None:
            os.close(self.fd)

    def unlink(self) -> None:
        """Removes the file, in the trainer whose writer has ended."""
        _remove(self.path)


def generation_of(path: Path) -> str:
    """Returns the name of a lock, or of a slot, without what tells it from others of its generation."""
    return path.name.rpartition("-")[0]


def is_awaited(path: Path) -> bool:
    """Returns whether it is of a writer that its trainer has left, and that has yet to read its orders."""
    with _opened(path) as fd:
        if fd is None or not _lock(fcntl.lockf, fd, fcntl.LOCK_SH):
            return False
        return not _lock(fcntl.flock, fd, fcntl.LOCK_SH)  # shared, so that two who ask do not meet each other


def reclaim(path: Path) -> None:
    """Removes the file if trainer and writer are gone."""
    with _opened(path) as fd:
        if fd is not None and _lock(fcntl.lockf, fd, fcntl.LOCK_SH) and _lock(fcntl.flock, fd, fcntl.LOCK_EX):
            _remove(path)


def _remove(path: Path) -> None:
    """Removes the name. One that stays, since its directory does not let go of it, says nothing without its locks."""
    with suppress(OSError):
        path.unlink()


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """Opens the file; yields None if it is this process's, another user's, gone, or no such file."""
    if path in _own:
        yield None
        return
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        found = os.fstat(fd)
        ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        yield fd if ours else None
    finally:
        os.close(fd)


def _lock(how: Callable[[int, int], object], fd: int, mode: int) -> bool:
    try:
        how(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _in_child() -> None:
    """Closes the files in a forked child, which may outlive both trainer and writer."""
    for lock in _own.values():
        os.close(lock.fd)
    _own.clear()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_in_child)
