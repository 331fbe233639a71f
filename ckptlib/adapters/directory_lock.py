"""Locks directories, so that a process that looks at one knows whether another one works there.

A forked child gives them up: else a worker of a DataLoader would hold them when its parent is killed.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_locks: set[int] = set()
"""Descriptors of the locks that this process has."""


def take(directory: Path) -> int | None:
    """Returns a directory's descriptor, locked if the file system can; None if another process has the lock."""
    found = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    _locks.add(found)
    try:
        fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        give_up(found)
        return None
    except OSError as error:
        log.debug("%s: cannot be locked: %s", directory, error)
    return found


def give_up(lock: int) -> None:
    if lock in _locks:  # not in a forked child, where the number may be another file's by now
        _locks.discard(lock)
        os.close(lock)


def _give_all_up() -> None:
    """Gives up all locks in a forked child."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_give_all_up)
