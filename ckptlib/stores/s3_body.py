"""The body of one request: sent from where it lies, checked by the server, and seen to move."""

from __future__ import annotations

import base64
import hashlib
import time
import zlib
from collections.abc import Iterator
from functools import cached_property

from typing_extensions import Buffer

from ckptlib.stores import io_limits

_SLICE_NBYTES = 256 << 10
"""Bytes for one call of `send`."""

_SMALL_NBYTES = 16 << 10
"""Smaller pieces are joined first."""

_SOCKET_NBYTES = 4 << 20
"""How many bytes of a body that looks sent the kernel may still hold (the end of tcp_wmem)."""


class Progress:
    """The progress of one try: how long it may yet stand still."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._since = time.monotonic()

    def moved(self) -> None:
        self._since = time.monotonic()

    def handed_over(self, nbytes: int) -> None:
        """Notes that a body was sent: some of its `nbytes` may still be in the kernel's hands, where they cannot be
        seen to move."""
        self._since = time.monotonic() + min(nbytes, _SOCKET_NBYTES) / io_limits.SLOWEST_BPS

    def left_s(self) -> float:
        return self._since + self.limit_s - time.monotonic()


class Body:
    """A request's body: the bytes of the views, one behind the other."""

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views
        self.nbytes = sum(view.nbytes for view in views)

    @cached_property
    def crc32(self) -> str:
        """The CRC32, at 4 GB/s, where SHA-256 has 1.8 and MD5 0.75; other threads run meanwhile."""
        crc = 0
        for view in self.views:
            crc = zlib.crc32(view, crc)
        return base64.b64encode(crc.to_bytes(4, "big")).decode()

    @cached_property
    def md5(self) -> bytes:
        md5 = hashlib.md5(usedforsecurity=False)
        for view in self.views:
            md5.update(view)
        return md5.digest()

    def sent(self, progress: Progress) -> Buffer | Sending:
        """Returns the body for one try of botocore."""
        return Sending(self, progress) if self.nbytes else b""

    def slices(self) -> Iterator[Buffer]:
        small: list[memoryview] = []
        for view in self.views:
            for start in range(0, view.nbytes, _SLICE_NBYTES):
                piece = view[start : start + _SLICE_NBYTES]
                if piece.nbytes < _SMALL_NBYTES:
                    small.append(piece)
                if small and (piece.nbytes >= _SMALL_NBYTES or len(small) > 1000):
                    yield b"".join(small)
                    small = []
                if piece.nbytes >= _SMALL_NBYTES:
                    yield piece
        if small:
            yield b"".join(small)


class Sending:
    """One try at sending a body: aiohttp iterates over it, botocore reads it if the user wants payloads signed."""

    def __init__(self, body: Body, progress: Progress) -> None:
        self._body, self._progress = body, progress
        self._slices = body.slices()

    def __len__(self) -> int:
        return self._body.nbytes

    def __aiter__(self) -> Sending:
        self.seek(0)  # a request may be made again, to another region or on a fresh connection
        return self

    async def __anext__(self) -> Buffer:
        """Returns the next slice; asked for when the one before has left for the kernel."""
        for piece in self._slices:
            self._progress.moved()
            return piece
        self._progress.handed_over(self._body.nbytes)
        raise StopAsyncIteration

    def read(self, nbytes: int = -1) -> Buffer:
        """Returns the next slice, of whatever size; b'' at the end."""
        return next(self._slices, b"")

    def tell(self) -> int:
        return 0

    def seek(self, position: int) -> int:
        """Goes back to the start, which is all that anybody asks for."""
        self._slices = self._body.slices()
        return position
