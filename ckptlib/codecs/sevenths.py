"""Even bytes in seven eighths of their space: noise but for its lowest bit, as are the mantissas of positive numbers.

A Huffman code gets there, too, at a tenth of the speed. The plane is cut in eight parts; bit i + 1 of the last one goes
where part i, of the other seven, has its lowest bit. Pure numpy; knows no frame.
"""

from __future__ import annotations

import numpy as np

from ckptlib.codecs.float_bits import Bytes


def packed_bytes(num_bytes: int) -> int:
    """Of a plane of so many."""
    return 7 * -(-num_bytes // 8)


def pack(plane: Bytes) -> Bytes | None:
    """None where a byte is odd."""
    if int(np.bitwise_or.reduce(plane)) & 1:
        return None
    size = -(-len(plane) // 8)
    packed = np.zeros(7 * size, np.uint8)
    kept = min(len(plane), 7 * size)
    packed[:kept] = plane[:kept]
    last = plane[kept:]
    bits = np.empty_like(last)
    for i, part in enumerate(packed.reshape(7, size)):
        np.right_shift(last, i + 1, out=bits)
        np.bitwise_and(bits, 1, out=bits)
        np.bitwise_or(part[: len(last)], bits, out=part[: len(last)])
    return packed


def unpack(packed: Bytes, num_bytes: int) -> Bytes:
    """The inverse, of `packed_bytes(num_bytes)` bytes."""
    size = len(packed) // 7
    plane = np.empty(8 * size, np.uint8)
    np.bitwise_and(packed, 0xFE, out=plane[: 7 * size])
    last, bits = plane[7 * size :], np.empty(size, np.uint8)
    last[:] = 0
    for i, part in enumerate(packed.reshape(7, size)):
        np.bitwise_and(part, 1, out=bits)
        np.multiply(bits, 2 << i, out=bits)  # numpy shifts bytes to the left ten times as slowly
        np.bitwise_or(last, bits, out=last)
    return plane[:num_bytes]
