"""Finds record locks of other processes: these belong to a process, go with it, and no child inherits them. No
torch."""

from __future__ import annotations

import os
import struct
from contextlib import suppress

with suppress(ImportError):  # on Windows, where this module is only imported
    import fcntl

_FLOCK = "hhqqi4x"
"""Linux's layout: type, whence, start, length, pid."""


def held_by_another(fd: int, byte: int) -> bool:
    """Returns whether another process has locked this byte of a file, for reading or writing.

    Queries the lock without taking it: otherwise a process that takes it at the same moment would find it taken.
    """
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    return bool(struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))[0] != fcntl.F_UNLCK)
