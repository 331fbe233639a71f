"""HTTP/1.1 on a connection: heads, and bodies piece by piece, as the bytes that they are. Knows no faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

BUFFER_NBYTES = 256 << 10
"""Bounds a head, and what is read of a body at once."""


@dataclass(frozen=True, slots=True)
class Head:
    raw: bytes
    """With the empty line."""
    words: tuple[str, str, str]
    """Method, target and version; or version, status and reason."""
    fields: Mapping[bytes, bytes]
    """Names in lower case."""

    @property
    def keeps_alive(self) -> bool:
        wanted = self.fields.get(b"connection", b"").lower()
        return b"close" not in wanted and ("HTTP/1.1" in self.words or b"keep-alive" in wanted)


@dataclass(frozen=True, slots=True)
class Framing:
    """How a body's end is told."""

    nbytes: int | None
    """None when nobody knows beforehand."""
    is_chunked: bool = False


NO_BODY = Framing(0)


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """None when the connection ends before its first byte. Raises ValueError for what is no HTTP."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    first, *lines = raw[:-4].split(b"\r\n")
    words = (*first.decode("latin-1").split(" ", 2), "", "")[:3]
    if not any(word.startswith("HTTP/1.") for word in words):
        raise ValueError(f"not HTTP/1: {first[:80]!r}")
    split = (line.partition(b":") for line in lines)
    return Head(raw, (words[0], words[1], words[2]), {name.strip().lower(): value.strip() for name, _, value in split})


def request_framing(head: Head) -> Framing:
    return _framing(head, Framing(0))


def answer_framing(head: Head, method: str) -> Framing:
    """A body without a length goes on until the connection ends."""
    if method == "HEAD" or head.words[1] in ("204", "304"):
        return NO_BODY
    return _framing(head, Framing(None))


def _framing(head: Head, otherwise: Framing) -> Framing:
    if b"chunked" in head.fields.get(b"transfer-encoding", b"").lower():
        return Framing(None, is_chunked=True)
    length = head.fields.get(b"content-length")
    return otherwise if length is None else Framing(_natural(length, 10))


def _natural(digits: bytes, base: int) -> int:
    number = int(digits, base)
    if number < 0:
        raise ValueError(f"a length of {number} bytes")
    return number


async def pieces(
    reader: asyncio.StreamReader, framing: Framing, piece_nbytes: int = BUFFER_NBYTES
) -> AsyncGenerator[tuple[bytes, bool], None]:
    """A body as it comes, and whether each piece is of the body itself or of its framing."""
    if framing.is_chunked:
        while True:
            line = await reader.readuntil(b"\r\n")
            yield line, False
            nbytes = _natural(line.partition(b";")[0], 16)
            if not nbytes:
                break
            async for piece in _exactly(reader, nbytes, piece_nbytes):
                yield piece, True
            yield await reader.readexactly(2), False
        while line != b"\r\n":  # trailers, and the empty line
            line = await reader.readuntil(b"\r\n")
            yield line, False
    elif framing.nbytes is None:
        while piece := await reader.read(piece_nbytes):
            yield piece, True
    else:
        async for piece in _exactly(reader, framing.nbytes, piece_nbytes):
            yield piece, True


async def _exactly(reader: asyncio.StreamReader, nbytes: int, piece_nbytes: int) -> AsyncGenerator[bytes, None]:
    left = nbytes
    while left:
        piece = await reader.read(min(left, piece_nbytes))
        if not piece:
            raise asyncio.IncompleteReadError(b"", left)
        left -= len(piece)
        yield piece


async def read_away(reader: asyncio.StreamReader, framing: Framing) -> int:
    """Reads a body and drops it; how many bytes it had."""
    total = 0
    async with contextlib.aclosing(pieces(reader, framing)) as found:
        async for piece, is_body in found:
            total += len(piece) if is_body else 0
    return total
