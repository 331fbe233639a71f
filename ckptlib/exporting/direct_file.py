"""Writes a file from its beginning to its end, past the page cache if that is possible.

Data is gathered in buffers of whole pages; a thread writes one while the next one is filled. Large data that is aligned
to pages, in memory and in the file, is written from where it is.
"""

from __future__ import annotations

import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor

from typing_extensions import Buffer, Self

from ckptlib.pages import PAGE_BYTES
from ckptlib.stores.base import as_bytes
from ckptlib.stores.flushing import CANNOT
from ckptlib.stores.local_direct import FROM_BYTES, address_of, past_cache, written

BUFFER_BYTES = 8 * 1024 * 1024
"""Bytes of one buffer, and of one write."""

NUM_BUFFERS = 3


class DirectFile:
    """A file that is written through buffers, by offset, from 0 on. Leaving the context waits for writes under way;
    `finish` writes the rest. Methods raise OSError, also for data that was given before."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffers = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(NUM_BUFFERS)]
        self._under_way: list[Future[None]] = []
        self._executor = ThreadPoolExecutor(1, "ckptlib-export-write")
        self._filled = 0
        self._error: OSError | None = None
        self.nbytes = 0
        """Bytes that were given so far."""

    def write(self, data: Buffer) -> int:
        """Appends data, which may be changed once this returns. Returns the number of bytes."""
        view = as_bytes(data)
        given = view.nbytes
        if given >= FROM_BYTES and self.nbytes % PAGE_BYTES == 0 and address_of(view) % PAGE_BYTES == 0:
            view = self._write_in_place(view)
        while view:
            room = min(view.nbytes, BUFFER_BYTES - self._filled)
            with memoryview(self._buffers[-1]) as buffer:
                buffer[self._filled : self._filled + room] = view[:room]
            self._filled, self.nbytes, view = self._filled + room, self.nbytes + room, view[room:]
            if self._filled == BUFFER_BYTES:
                self._submit()
        return given

    def _write_in_place(self, view: memoryview) -> memoryview:
        """Writes the whole pages of `view`, and waits: copying them would cost as much again. Returns the rest."""
        if self._filled:
            self._submit()
        pages = view[: view.nbytes - view.nbytes % PAGE_BYTES]
        self._under_way.append(self._executor.submit(_write, self._fd, pages, self.nbytes))
        while self._under_way:
            self._await_first()
        self.nbytes += pages.nbytes
        return view[pages.nbytes :]

    def flush(self) -> None:
        """Does nothing. `torch.save` calls it after each object; `finish` writes the rest."""

    def finish(self) -> None:
        """Writes the rest, and waits for all writes. Does not sync to the disk. Raises again what a `write` has raised,
        since its caller may have swallowed that."""
        if self._error is not None:
            raise self._error
        if self._filled:
            self._submit()
        while self._under_way:
            self._await_first()

    def _submit(self) -> None:
        """Submits the buffer that was filled; the one that was submitted longest ago is filled next."""
        buffer, nbytes = self._buffers.pop(), self._filled
        self._under_way.append(self._executor.submit(_write_some, self._fd, buffer, nbytes, self.nbytes - nbytes))
        self._buffers.insert(0, buffer)
        self._filled = 0
        while len(self._under_way) >= NUM_BUFFERS:
            self._await_first()

    def _await_first(self) -> None:
        try:
            self._under_way.pop(0).result()
        except OSError as error:
            self._error = error
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown()
        self._buffers.clear()  # not closed: a view of one may live on in the traceback of an error


def _write_some(fd: int, buffer: mmap.mmap, nbytes: int, at: int) -> None:
    with memoryview(buffer) as view:
        _write(fd, view[:nbytes], at)


def _write(fd: int, view: memoryview, at: int) -> None:
    """Writes `view` at offset `at`. Both begin on a page."""
    done, whole = 0, view.nbytes - view.nbytes % PAGE_BYTES
    with past_cache(fd) as possible:
        try:
            while possible and done < whole and done % PAGE_BYTES == 0:  # a short write may end inside a page
                done += written(os.pwrite(fd, view[done:whole], at + done))
        except OSError as error:
            if error.errno not in CANNOT:
                raise
    while done < view.nbytes:
        done += written(os.pwrite(fd, view[done:], at + done))
