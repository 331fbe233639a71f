"""The file that a writer prints to: in a directory that nobody else can write to. No torch."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from ckptlib.slots import files

with contextlib.suppress(ImportError):  # on Windows, where this module is only imported
    import fcntl

log = logging.getLogger(__name__)

EMPTY_S, PRINTED_S = 3600.0, 30 * 86400.0
"""Ages in seconds at which logs of writers that have ended are removed: empty ones, and others."""


def new_path(rank: int) -> Path:
    """Returns the path that the writer of a rank of this process prints to; there is no such file yet."""
    directory = _directory()
    _tidy(directory)
    return directory / f"writer-rank{rank}-{os.getpid()}-{secrets.token_hex(4)}.log"


def append_to(path: Path) -> BinaryIO:
    """Opens the file, and makes it if need be. It is locked while it is open here, or in a writer that inherited it."""
    return open(path, "ab", opener=_open_locked)


def _open_locked(name: str, flags: int) -> int:
    fd = os.open(name, flags | os.O_NOFOLLOW, 0o600)
    with contextlib.suppress(OSError):  # if the file system has no locks, `remove_old` leaves it
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd


@functools.cache
def _tidy(directory: Path) -> None:
    """Removes old logs, once per process: there may be thousands, and a restarted writer is waited for."""
    remove_old(directory)


def remove_old(directory: Path) -> None:
    """Removes old logs: each start of a job leaves those of writers that were killed, or printed something."""
    now = time.time()
    for path in directory.glob("writer-*.log"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if now - found.st_mtime > (PRINTED_S if found.st_size else EMPTY_S) and not _is_open(path):
                path.unlink()


def _is_open(path: Path) -> bool:
    """Returns whether its writer runs. Raises OSError if that cannot be told."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _directory() -> Path:
    """Returns the directory for all jobs of this user; if somebody else took its name first, one of this job's own.

    The temporary directory, or /dev/shm if there is none, is everybody's: a link there would lead the log elsewhere,
    and whoever owns the directory could put another file in the log's place.
    """
    path = files.usual()[-1] / f"ckptlib-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    problem = _problem(path.lstat())
    if problem is None:
        return path
    own = Path(tempfile.mkdtemp(prefix=f"{path.name}-", dir=path.parent))
    log.warning("%s %s, so the writer logs to %s; remove it, or give it to this user alone", path, problem, own)
    return own


def _problem(found: os.stat_result) -> str | None:
    if not stat.S_ISDIR(found.st_mode):
        return "is a symbolic link" if stat.S_ISLNK(found.st_mode) else "is no directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}"
    return f"may be written to by others (mode {found.st_mode & 0o7777:o})" if found.st_mode & 0o022 else None
