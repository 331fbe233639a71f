"""The file that a writer prints to: in a directory that nobody else can write to. No torch."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import BinaryIO

from ckptlib.slots import files

log = logging.getLogger(__name__)


def new_path(rank: int) -> Path:
    """Where the writer of a rank of this process prints to; there is no such file yet."""
    return _directory() / f"writer-rank{rank}-{os.getpid()}-{secrets.token_hex(4)}.log"


def append_to(path: Path) -> BinaryIO:
    """The file, made where there is none."""
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o600))


def _directory() -> Path:
    """One for all jobs of this user; where somebody else was first to take its name, one of this job's own.

    The temporary directory, or where there is none /dev/shm, is everybody's: a link there would lead the log elsewhere,
    and who owns the directory could put another file in its place.
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
