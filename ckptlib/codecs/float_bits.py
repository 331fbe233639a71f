"""Cuts floats into planes of similar bits, and joins them again. Pure numpy; knows no frame and no coder.

The upper 16 bits of a float are rotated so that its exponent fills the upper byte. The rest of them (the top of the
mantissa, the sign) fills the lower one:

    float32, bfloat16   s eeeeeeee mmmmmmm       ->  eeeeeeee  mmmmmmm s
    float16             s eeeee mmmmmmmmmm       ->  eeeee mmm  mmmmmmm s
    float64             s EEE eeeeeeee mmmm      ->  eeeeeeee  mmmm s EEE

The first bytes of all floats are the plane of exponents, the second ones that of mantissas; the bits below are the low
plane. Floats of one byte are a plane of exponents as they are. Numpy shifts and casts whole words ten times as fast as
it gathers every fourth byte, so nothing here is strided. It does both in one call, in pieces of its own that stay in a
core's first cache: so there are few calls, and each takes long compared with a switch of the interpreter's lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class Kind:
    """How floats of one dtype are cut."""

    code: int
    """Code of the kind in frames."""
    itemsize: int
    rotation: int
    """Bits by which the upper 16 are rotated to the left."""

    @property
    def low_bytes(self) -> int:
        """Bytes per element in the low plane."""
        return max(0, self.itemsize - 2)

    @property
    def mantissa_bytes(self) -> int:
        """Bytes per element in the plane of mantissas."""
        return min(1, self.itemsize - 1)


_SINGLE, _HALF, _DOUBLE, _QUARTER = Kind(0, 4, 1), Kind(1, 2, 1), Kind(2, 8, 4), Kind(3, 1, 0)
KINDS = {
    "float32": _SINGLE,
    "bfloat16": _HALF,
    "float16": _HALF,
    "float64": _DOUBLE,
    "float8_e4m3fn": _QUARTER,
    "float8_e4m3fnuz": _QUARTER,
    "float8_e5m2": _QUARTER,
    "float8_e5m2fnuz": _QUARTER,
    "float8_e8m0fnu": _QUARTER,
    "float4_e2m1fn_x2": _QUARTER,
}
"""Kinds by torch's name of the dtype."""
BY_CODE = {kind.code: kind for kind in KINDS.values()}


class Cutter:
    """Cuts and joins floats in memory that it reuses. For one thread at a time."""

    def __init__(self, num_elements: int) -> None:
        """Allocates memory for up to `num_elements` at once."""
        self._upper, self._other = np.empty(num_elements, "<u2"), np.empty(num_elements, "<u2")
        self._low = np.empty(num_elements, "<u4")
        self._wide = np.empty(0, "<u8")

    def cut(self, kind: Kind, raw: Bytes, exponents: Bytes, mantissas: Bytes, low: Bytes) -> None:
        """Fills the planes, which have the bytes per element of `raw` that `kind` says."""
        if kind.itemsize == 1:
            np.copyto(exponents, raw)
            return
        upper = self._cut_low(raw.view(f"<u{kind.itemsize}"), _lanes(kind, low))
        np.right_shift(upper, 8 - kind.rotation, out=exponents, casting="unsafe")
        rotated = self._other.view(np.uint8)[: len(upper)]
        np.copyto(mantissas, upper, casting="unsafe")
        np.multiply(mantissas, 1 << kind.rotation, out=mantissas)  # numpy shifts bytes ten times as slowly
        if kind.rotation == 1:  # a bit that is compared costs half of one that is shifted
            np.less(upper.view("<i2"), 0, out=rotated.view(np.bool_))
        else:
            np.right_shift(upper, 16 - kind.rotation, out=rotated, casting="unsafe")
        np.bitwise_or(mantissas, rotated, out=mantissas)

    def _cut_low(self, items: Words, lanes: list[Words]) -> Words:
        """Returns the upper 16 bits; writes those below to the lanes."""
        if not lanes:
            return items
        bits = 0
        for lane in lanes:
            _narrow(items, bits, lane)
            bits += 8 * lane.itemsize
        upper = self._upper[: len(items)]
        _narrow(items, bits, upper)
        return upper

    def join(self, kind: Kind, exponents: Bytes, mantissas: Bytes, low: Bytes, out: Bytes) -> None:
        """Fills `out` with the floats that `cut` cut."""
        if kind.itemsize == 1:
            np.copyto(out, exponents)
            return
        items, lanes = out.view(f"<u{kind.itemsize}"), _lanes(kind, low)
        a, b = self._upper[: len(items)], self._other[: len(items)]
        np.copyto(a, exponents)
        np.multiply(a, 256, out=a)
        np.copyto(b, mantissas)
        np.bitwise_or(a, b, out=a)
        np.right_shift(a, kind.rotation, out=b)
        np.multiply(a, 1 << 16 - kind.rotation, out=a)
        np.bitwise_or(a, b, out=a if lanes else items)
        if lanes:
            self._join_low(a, lanes, items)

    def _join_low(self, upper: Words, lanes: list[Words], items: Words) -> None:
        bits = 8 * (items.itemsize - upper.itemsize)
        np.copyto(items, upper)
        np.multiply(items, 1 << bits, out=items)
        for lane in reversed(lanes):
            bits -= 8 * lane.itemsize
            copy = self._low.view(lane.dtype)[: len(lane)]
            np.copyto(copy, lane)  # a lane in a frame need not be aligned: such a cast is slow, such a copy is not
            if bits:
                if len(self._wide) < len(items):  # doubles are few
                    self._wide = np.empty(len(self._upper), "<u8")
                word = self._wide[: len(items)]
                np.left_shift(copy, np.uint64(bits), out=word, dtype="<u8")  # otherwise numpy 1 shifts within a lane
                np.bitwise_or(items, word, out=items)
            else:
                np.bitwise_or(items, copy, out=items)


def _narrow(items: Words, bits: int, out: Words) -> None:
    """Fills `out` with the bits of `items` from bit number `bits` on."""
    if bits:
        np.right_shift(items, bits, out=out, casting="unsafe")
    else:
        np.copyto(out, items, casting="unsafe")


def _lanes(kind: Kind, low: Bytes) -> list[Words]:
    """Returns the low plane of n elements as lanes: n times the lowest 16 bits; of 8 bytes, n times 32, then 16."""
    if kind.itemsize == 8:
        cut = len(low) // 6 * 4
        return [low[:cut].view("<u4"), low[cut:].view("<u2")]
    return [low.view("<u2")] if kind.itemsize == 4 else []
