"""A file that is written from its beginning to its end, around the page cache where that is possible.

What is given is gathered in buffers of whole pages, of which a thread writes one while the next one is filled. What is
large and lies on pages, here and in the file, is written from where it is.
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
"""Of one write; there are NUM_BUFFERS."""

NUM_BUFFERS = 3


class DirectFile:
    """Owns the descriptor's position from 0 on. Leaving the context waits for what is under way; `finish` writes the
    rest. Raises OSError, also for what was given before."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffers = [mmap.mmap(-1, BUFFER_BYTES) for _ in range(NUM_BUFFERS)]
        self._under_way: list[Future[None]] = []
        self._executor = ThreadPoolExecutor(1, "ckptlib-export-write")
        self._filled = 0
        self._error: OSError | None = None
        self.nbytes = 0
        """That were given."""

    def write(self, data: Buffer) -> int:
        """Appends. The data may be changed when this returns."""
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
        """Writes the whole pages of it, and waits: to copy them would cost as much again. Returns the rest."""
        if self._filled:
            self._submit()
        pages = view[: view.nbytes - view.nbytes % PAGE_BYTES]
        self._under_way.append(self._executor.submit(_write, self._fd, pages, self.nbytes))
        while self._under_way:
            self._await_first()
        self.nbytes += pages.nbytes
        return view[pages.nbytes :]

    def flush(self) -> None:
        """For `torch.save`, which asks for it after each object; `finish` counts."""

    def finish(self) -> None:
        """Writes the rest, and waits for all of it. Nothing is flushed to the disk itself. Raises again what a `write`
        has raised: whoever called that may have kept it for himself."""
        if self._error is not None:
            raise self._error
        if self._filled:
            self._submit()
        while self._under_way:
            self._await_first()

    def _submit(self) -> None:
        """The buffer that was filled; the one that was given longest ago is filled next."""
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
        self._buffers.clear()  # a view of one may live on in the trace of an error


def _write_some(fd: int, buffer: mmap.mmap, nbytes: int, at: int) -> None:
    with memoryview(buffer) as view:
        _write(fd, view[:nbytes], at)


def _write(fd: int, view: memoryview, at: int) -> None:
    """`view` and `at`: on a page."""
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
