"""The frame of a lossy codec: its codes, the numbers that it could not code, and its largest errors. Knows no codec.

Numbers are float32, in blocks of 256; the last block may be shorter. Little-endian, in this order: the largest absolute
and the largest relative error (2 float64); per block its scale (float32; 0 for a raw block; absent if the codec has
none); per number its code (0 in raw blocks); per block a bit, whether it is raw (lowest bit first, padded with 0); the
numbers of the raw blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ckptlib.errors import FormatError

BLOCK = 256
SMALLEST = 2.0**-94
"""The smallest scale except 0. Then no product of a decoder is denormal, so that flush-to-zero changes no bit of it."""
_ERRORS = 16

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint32]
Codes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
Rows = npt.NDArray[np.bool_]


class Bound(NamedTuple):
    """The largest errors against the numbers that were saved."""

    absolute: float
    """In the tensor's own unit."""
    relative: float
    """As a fraction of the largest absolute value in the number's block."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties that determine the size of a frame's fields."""

    num_values: int
    code: npt.DTypeLike
    """uint8 or uint16."""
    scaled: bool

    @property
    def num_blocks(self) -> int:
        return -(-self.num_values // BLOCK)

    def num_bytes(self, num_raw_values: int = 0) -> int:
        """Returns the bytes of the whole frame."""
        per_value = np.dtype(self.code).itemsize
        scales = 4 * self.num_blocks if self.scaled else 0
        return _ERRORS + scales + per_value * self.num_values + -(-self.num_blocks // 8) + 4 * num_raw_values


@dataclass(frozen=True, slots=True)
class Views:
    """The fields of a frame that lies in memory. None is copied."""

    errors: npt.NDArray[np.float64]
    scales: Floats
    """Empty if the codec has none."""
    codes: Codes
    raw_bits: Bytes
    raw: Bytes

    @classmethod
    def of(cls, frame: Bytes, shape: Shape) -> Views:
        """Returns views of `frame`, which has at least `shape.num_bytes()`."""
        ends = [_ERRORS]
        ends.append(ends[-1] + (4 * shape.num_blocks if shape.scaled else 0))
        ends.append(ends[-1] + np.dtype(shape.code).itemsize * shape.num_values)
        ends.append(ends[-1] + -(-shape.num_blocks // 8))
        errors, scales, codes, bits, raw = np.split(frame, ends)
        return cls(errors.view("<f8"), scales.view("<f4"), codes.view(shape.code), bits, raw)


def build(shape: Shape, bound: Bound, scales: Floats, codes: Codes, is_raw: Rows, raw: bytes) -> bytes:
    """Returns the frame. `raw` holds the numbers of the raw blocks."""
    frame = np.empty(shape.num_bytes(), np.uint8)
    views = Views.of(frame, shape)
    views.errors[:] = bound
    views.scales[:] = scales[: len(views.scales)]
    views.codes[:] = codes
    views.raw_bits[:] = np.packbits(is_raw, bitorder="little")
    return frame.tobytes() + raw


def bound_of(frame: memoryview, declared: float) -> Bound:
    """Returns the largest errors in a frame. Raises FormatError if it claims more than its codec declares."""
    if frame.nbytes < _ERRORS:
        raise FormatError(f"a lossy frame of {frame.nbytes} bytes is torn; expected {_ERRORS} bytes or more")
    absolute, relative = np.frombuffer(frame[:_ERRORS], "<f8").tolist()
    if not (0 <= absolute < math.inf and 0 <= relative <= declared):
        raise FormatError(f"a lossy frame claims errors of {absolute} and {relative}; its codec's are <= {declared}")
    return Bound(absolute, relative)


def parse(frame: memoryview, shape: Shape) -> tuple[Views, Rows]:
    """Returns a frame's fields, and the raw blocks. Raises FormatError if they contradict each other or `shape`."""
    expected = shape.num_bytes()
    if frame.nbytes < expected:
        raise FormatError(f"a lossy frame has {frame.nbytes} bytes for {shape.num_values} numbers; expected {expected}")
    views = Views.of(np.frombuffer(frame, np.uint8), shape)
    bits = np.unpackbits(views.raw_bits, bitorder="little").view(np.bool_)
    is_raw = bits[: shape.num_blocks]
    if bits[shape.num_blocks :].any():
        raise FormatError(f"a lossy frame marks raw blocks beyond its last one, number {shape.num_blocks - 1}")
    expected = shape.num_bytes(num_in(is_raw, shape.num_values))
    if frame.nbytes != expected:
        raise FormatError(
            f"a lossy frame has {frame.nbytes} bytes, {is_raw.sum()} raw blocks; expected {expected} bytes"
        )
    if shape.scaled:
        _check_scales(views.scales, is_raw)
    return views, is_raw


def num_in(is_raw: Rows, num_values: int) -> int:
    """Returns how many numbers the blocks selected by `is_raw` hold; the last block may be short."""
    missing = -num_values % BLOCK if len(is_raw) and is_raw[-1] else 0
    return int(is_raw.sum()) * BLOCK - missing


def _check_scales(scales: Floats, is_raw: Rows) -> None:
    """Checks scales by their bits, because the floats are not trusted yet. Raises FormatError."""
    bits = scales.view("<u4")
    low, high = (int(np.float32(limit).view(np.uint32)) for limit in (SMALLEST, np.inf))
    wrong = ((bits < low) | (bits >= high) | is_raw) & (bits != 0)
    if wrong.any():
        block = int(wrong.argmax())
        raise FormatError(
            f"a lossy frame gives block {block} the scale {scales[block]}; expected 0, or {SMALLEST} or more"
        )
