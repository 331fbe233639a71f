"""Locks of directories, by which a process that looks at one knows that another one works there.

A forked child has none: such as a worker of a DataLoader, which would hold them when its parent is killed.
"""

from __future__ import annotations

import fcntl
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

_locks: set[int] = set()
"""The descriptors of those that this process has."""


def take(directory: Path) -> int | None:
    """Its descriptor, with a lock on it where the file system knows locks; None where another process has that."""
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
    """In a forked child."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_give_all_up)
