"""Ways to make a codec's frame wrong."""

from __future__ import annotations

from collections.abc import Callable

Break = Callable[[bytes], bytes]


def flipped(frame: bytes, byte: int) -> bytes:
    found = bytearray(frame)
    found[byte] ^= 1
    return bytes(found)


def without_a_row(frame: bytes) -> bytes:
    """The last row that changed is left out, and its gap; as if it had been overlooked."""
    width, row, num = frame[1], int.from_bytes(frame[4:8], "little"), int.from_bytes(frame[12:16], "little")
    assert frame[0] == 0, "not by zstd"
    body, gaps = frame[24 : -num * width], frame[-num * width :]
    rows, edges = body[: num * row], body[num * row :]
    head = frame[:12] + (num - 1).to_bytes(4, "little") + frame[16:24]
    return head + rows[:-row] + edges + gaps[:-width]
