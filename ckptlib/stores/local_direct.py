"""Large reads and writes that leave the page cache alone (O_DIRECT), if a file system takes them.

A bare copy of 2 GB took 0.3 s of CPU per GB in this way, and 3.1 s through the page cache, on a virtual machine whose
two cores had other work as well.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from ckptlib.libc import read_cached
from ckptlib.pages import PAGE_BYTES
from ckptlib.stores.flushing import CANNOT

with suppress(ImportError):  # on Windows, where nothing is read or written so
    import fcntl

O_DIRECT: int = getattr(os, "O_DIRECT", 0)

FROM_BYTES = 1024 * 1024
"""Smaller reads are not worth it."""

SLICE_BYTES = 4 * 1024 * 1024
"""Bytes per read through memory of our own, if the caller's range of the file, or memory, does not begin on a page."""

_local = threading.local()


def written(count: int) -> int:
    """Returns the count that a write returned. Raises OSError for 0, which would be tried for ever."""
    if count == 0:
        raise OSError(errno.EIO, "the file system wrote nothing and gave no reason")
    return count


def address_of(view: memoryview) -> int:
    """Returns the address of the first byte."""
    return int(np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0])


@contextmanager
def past_cache(fd: int) -> Iterator[bool]:
    """Lets the descriptor go around the page cache within the context; yields False if that is not possible here.

    Nobody else may use the descriptor meanwhile.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL) if O_DIRECT else 0
    try:
        if O_DIRECT:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
        yield False
        return
    try:
        yield bool(O_DIRECT)
    finally:
        if O_DIRECT:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)


def read_past_cache(fd: int, view: memoryview, offset: int) -> int:
    """Fills the beginning of `view` from `offset`; returns how many bytes. The caller reads the rest in another way:
    what is in the page cache anyway, what is small, the last part of a page."""
    if view.nbytes < FROM_BYTES or not O_DIRECT or _is_cached(fd, view, offset):
        return 0
    with past_cache(fd) as possible:
        if not possible:
            return 0
        try:
            if offset % PAGE_BYTES or address_of(view) % PAGE_BYTES:
                return _read_through(fd, view, offset)
            done, stop = 0, view.nbytes - view.nbytes % PAGE_BYTES
            while done < stop and done % PAGE_BYTES == 0:  # a short read may end inside a page
                count = os.preadv(fd, [view[done:stop]], offset + done)
                if not count:
                    break
                done += count
            return done
        except OSError as error:
            if error.errno not in CANNOT:
                raise
            return 0


def _read_through(fd: int, view: memoryview, offset: int) -> int:
    """Reads by way of a buffer that is aligned as direct I/O wants it."""
    if not hasattr(_local, "buffer"):
        _local.buffer = mmap.mmap(-1, SLICE_BYTES)
    done = 0
    with memoryview(_local.buffer) as buffer:
        while done < view.nbytes:
            skipped = (offset + done) % PAGE_BYTES
            count = os.preadv(fd, [buffer], offset + done - skipped) - skipped
            if count <= 0:
                break
            count = min(count, view.nbytes - done)
            view[done : done + count] = buffer[skipped : skipped + count]
            done += count
    return done


def _is_cached(fd: int, view: memoryview, offset: int) -> bool:
    """Returns whether its first, middle and last page are in memory already: then the rest is likely to be.

    The first one alone may be there since the kernel read ahead for the read before, and so on to the end of a file.
    """
    last = view.nbytes - PAGE_BYTES
    return all(_has_page(fd, view[at:][:PAGE_BYTES], offset + at) for at in (0, last // 2, last))


def _has_page(fd: int, view: memoryview, offset: int) -> bool:
    """Returns whether this page is in memory. If not, the kernel may begin to read it."""
    try:
        return read_cached(fd, view, offset) > 0
    except BlockingIOError:
        return False
    except OSError as error:  # a file system that cannot tell
        if error.errno not in CANNOT:
            raise
        return False
