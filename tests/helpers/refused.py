"""A disk that refuses one write of this process."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def refused_pwrite(at: int) -> Iterator[None]:
    """This call of `os.pwrite` from here on, in whatever thread, is answered by EIO; 0: none is."""
    count, pwrite = itertools.count(1), os.pwrite

    def write(fd: int, data: bytes, offset: int) -> int:
        if next(count) == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pwrite(fd, data, offset)

    with mock.patch.object(os, "pwrite", write):
        yield
