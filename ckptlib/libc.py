"""Calls to the kernel for which Python has no function, or only where it was built on a recent system.

The Pythons of conda, and those of uv until August 2026, were built on an old one, so that they run everywhere: they
lack `os.memfd_create` and `os.RWF_NOWAIT`, whatever the machine can do. The machine's own C library has both. It is
asked through ctypes. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from typing import Any

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_MADV_POPULATE_WRITE = 23
_MFD_CLOEXEC = 1
_RWF_NOWAIT = 8


class _Span(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def memory_file(name: str) -> int:
    """Returns a new, empty file in memory, which ends with its last descriptor; programs do not inherit this one.

    Raises OSError if the system has no such files.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    return _call("memfd_create", name.encode(), _MFD_CLOEXEC)


def read_cached(fd: int, view: memoryview, offset: int) -> int:
    """Fills the beginning of `view` with what the page cache has from `offset`; returns how many bytes.

    Raises BlockingIOError if it has nothing, and OSError if the file system cannot tell.
    """
    if hasattr(os, "RWF_NOWAIT"):
        return os.preadv(fd, [view], offset, os.RWF_NOWAIT)
    span = _Span(ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes)
    return _call("preadv2", fd, ctypes.byref(span), 1, ctypes.c_int64(offset), _RWF_NOWAIT)


def populate(address: int, nbytes: int) -> None:
    """Maps these pages for writing, without the GIL. Raises OSError where the kernel is older than 5.14."""
    _call("madvise", ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE)


def give_back(fd: int, nbytes: int) -> None:
    """Gives back the memory, or the blocks, of the first bytes of a file, which are zeros from here on; its size stays.

    Raises OSError if the file system cannot.
    """
    _call("fallocate", fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(nbytes))


def _call(name: str, *args: Any) -> int:
    try:
        function = getattr(_library(), name)
    except AttributeError:
        raise OSError(errno.ENOSYS, f"the C library has no {name}") from None
    result = int(function(*args))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "preadv2"):
        library.preadv2.restype = ctypes.c_ssize_t
    return library
