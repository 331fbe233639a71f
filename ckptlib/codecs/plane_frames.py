"""How a frame stores planes: a head that says how, a length, and bytes.

    0  the plane's own bytes
    1  a zstd frame of them
    2  base u8, number of strays u32, strays, a zstd frame of the pairs: see `pairs`
    3  seven eighths of them: see `sevenths`

Knows no floats. Everything that is read is compared with the reader's expectation before memory is allocated for it.
"""

from __future__ import annotations

import struct

import numpy as np

from ckptlib.codecs import sevenths, zstd
from ckptlib.codecs.float_bits import Bytes
from ckptlib.codecs.pairs import Pairer, Pairs
from ckptlib.errors import FormatError

Parts = list[bytes | memoryview]

_HEAD = struct.Struct("<BI")
_PAIRS_HEAD = struct.Struct("<BI")
_RAW, _ZSTD, _PAIRS, _SEVENTHS = 0, 1, 2, 3


def stored(plane: Bytes) -> Parts:
    """Returns the plane as it is, not copied."""
    return [_HEAD.pack(_RAW, len(plane)), plane.data]


def coded(plane: Bytes) -> Parts:
    """Returns the plane coded by how often each byte occurs, or as it is if that is no larger."""
    body = zstd.huffman(plane.data)
    return [_HEAD.pack(_ZSTD, len(body)), body] if len(body) < len(plane) else stored(plane)


def paired(plane: Bytes, pairer: Pairer) -> Parts:
    """Returns the plane coded by how often each pair of symbols occurs; of many symbols, what `coded` returns."""
    pairs = pairer.pack(plane)
    if pairs is None:
        return coded(plane)
    packed = zstd.huffman(pairs.packed.data)
    strays = pairs.strays.tobytes()
    nbytes = _PAIRS_HEAD.size + len(strays) + len(packed)
    if nbytes >= len(plane):
        return stored(plane)
    return [_HEAD.pack(_PAIRS, nbytes), _PAIRS_HEAD.pack(pairs.base, len(strays)), strays, packed]


def without_lowest_bit(plane: Bytes) -> Parts:
    """Returns the plane without the lowest bits if all of its bytes are even; else as it is."""
    packed = sevenths.pack(plane)
    return stored(plane) if packed is None else [_HEAD.pack(_SEVENTHS, len(packed)), packed.data]


class FrameReader:
    """Reads a frame from front to back. Raises FormatError if the frame is not what a writer made."""

    def __init__(self, frame: memoryview) -> None:
        self._frame = frame
        self._at = 0

    def take(self, nbytes: int, what: str) -> memoryview:
        """Returns the next `nbytes` bytes."""
        left = len(self._frame) - self._at
        if nbytes > left:
            raise FormatError(f"a frame of {len(self._frame)} bytes is torn: {what}: {nbytes} bytes, {left} are left")
        self._at += nbytes
        return self._frame[self._at - nbytes : self._at]

    def plane(self, nbytes: int, what: str) -> Bytes:
        """Returns the next plane, which must have `nbytes`: in the frame's own memory if it is stored as it is."""
        flag, length = _HEAD.unpack(self.take(_HEAD.size, f"head of {what}"))
        return self._plain(flag, length, nbytes, what)

    def plane_into(self, plane: Bytes, pairer: Pairer, what: str) -> None:
        """Fills `plane` with the next plane, which must be as long and may be in pairs."""
        flag, length = _HEAD.unpack(self.take(_HEAD.size, f"head of {what}"))
        if flag != _PAIRS:
            np.copyto(plane, self._plain(flag, length, len(plane), what))
            return
        inner = FrameReader(self.take(length, what))
        base, num_strays = _PAIRS_HEAD.unpack(inner.take(_PAIRS_HEAD.size, f"base of {what}"))
        strays = np.frombuffer(inner.take(num_strays, f"strays of {what}"), np.uint8)
        packed = zstd.inflate(inner.rest(), -(-len(plane) // 2))
        if not pairer.unpack(Pairs(base, strays, np.frombuffer(packed, np.uint8)), plane):
            raise FormatError(f"a frame holds {num_strays} strays of {what}, and places for more or fewer")

    def rest(self) -> memoryview:
        """Returns all that is left."""
        return self.take(len(self._frame) - self._at, "")

    def end(self) -> None:
        """Raises FormatError if anything is left."""
        if self._at != len(self._frame):
            raise FormatError(f"a frame of {len(self._frame)} bytes should have ended after {self._at}")

    def _plain(self, flag: int, length: int, nbytes: int, what: str) -> Bytes:
        if flag == _ZSTD:
            return np.frombuffer(zstd.inflate(self.take(length, what), nbytes), np.uint8)
        fits = {_RAW: nbytes, _SEVENTHS: sevenths.packed_bytes(nbytes)}
        if fits.get(flag) != length:
            raise FormatError(f"a frame says {flag} and {length} bytes of {what}, of which there are {nbytes}")
        plain = np.frombuffer(self.take(length, what), np.uint8)
        return plain if flag == _RAW else sevenths.unpack(plain, nbytes)
