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
    packed = np.empty(7 * size, np.uint8)
    kept = min(len(plane), len(packed))
    packed[:kept], packed[kept:] = plane[:kept], 0
    last = plane[kept:]
    bits = np.bitwise_and(last, _BITS)
    np.greater(bits, 0, out=bits.view(np.bool_))  # numpy shifts bytes ten times as slowly
    parts = packed.reshape(7, size)[:, : len(last)]
    np.bitwise_or(parts, bits, out=parts)
    return packed


def unpack(packed: Bytes, num_bytes: int) -> Bytes:
    """The inverse, of `packed_bytes(num_bytes)` bytes."""
    size = len(packed) // 7
    plane = np.empty(8 * size, np.uint8)
    np.bitwise_and(packed, 0xFE, out=plane[: 7 * size])
    bits = np.bitwise_and(packed.reshape(7, size), 1)
    np.multiply(bits, _BITS, out=bits)
    np.bitwise_or.reduce(bits, axis=0, out=plane[7 * size :])
    return plane[:num_bytes]


_BITS = np.uint8(2) << np.arange(7, dtype=np.uint8)[:, None]
"""Of the last part, by the part that they go to."""
