"""Floats cut into planes of bits that are alike, and put together again. Pure numpy; knows no frame and no coder.

The upper 16 bits of a float are rotated so that its exponent fills the upper byte, and what is left of them (the top of
the mantissa, the sign) the lower one:

    float32, bfloat16   s eeeeeeee mmmmmmm       ->  eeeeeeee  mmmmmmm s
    float16             s eeeee mmmmmmmmmm       ->  eeeee mmm  mmmmmmm s
    float64             s EEE eeeeeeee mmmm      ->  eeeeeeee  mmmm s EEE

The first byte of all floats is the plane of exponents, the second that of mantissas; the bits below are the low plane.
Floats of one byte are a plane of exponents as they are. Numpy shifts and casts 16 bits ten times as fast as it gathers
every fourth byte, so nothing here is strided.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Words = NDArray[np.unsignedinteger[Any]]

_STEP = 1 << 17
"""Elements at a time: with half as many one thread is as fast, but two wait for the interpreter's lock more often."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How floats of one dtype are cut."""

    code: int
    """In frames."""
    itemsize: int
    rotation: int
    """Bits to the left, of the upper 16."""

    @property
    def low_bytes(self) -> int:
        """Per element, in the low plane."""
        return max(0, self.itemsize - 2)

    @property
    def mantissa_bytes(self) -> int:
        """Per element, in the plane of mantissas."""
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
"""By torch's name of the dtype."""
BY_CODE = {kind.code: kind for kind in KINDS.values()}


class Cutter:
    """Cuts and joins, in memory that it keeps. For one thread at a time."""

    def __init__(self) -> None:
        self._upper, self._other = np.empty(_STEP, "<u2"), np.empty(_STEP, "<u2")
        self._word, self._wide = np.empty(_STEP, "<u8"), np.empty(_STEP, "<u8")
        self._low = np.empty(_STEP, "<u4")

    def cut(self, kind: Kind, raw: Bytes, exponents: Bytes, mantissas: Bytes, low: Bytes) -> None:
        """Fills the planes, of as many bytes for each element of `raw` as `kind` says."""
        if kind.itemsize == 1:
            np.copyto(exponents, raw)
            return
        items, lanes = raw.view(f"<u{kind.itemsize}"), _lanes(kind, low)
        for part in _parts(len(items)):
            upper = self._without_low(items[part], [lane[part] for lane in lanes])
            a, b = self._other[: len(upper)], self._upper[: len(upper)]  # b may be `upper`, which is read last
            np.right_shift(upper, 8 - kind.rotation, out=a)
            np.copyto(exponents[part], a, casting="unsafe")
            np.left_shift(upper, kind.rotation, out=a)
            np.right_shift(upper, 16 - kind.rotation, out=b)
            np.bitwise_or(a, b, out=a)
            np.copyto(mantissas[part], a, casting="unsafe")

    def _without_low(self, items: Words, lanes: list[Words]) -> Words:
        """The upper 16 bits; those below go to the lanes."""
        if not lanes:
            return items
        word = self._word.view(items.dtype)[: len(items)]
        for lane in lanes:
            np.copyto(lane, items, casting="unsafe")
            np.right_shift(items, 8 * lane.itemsize, out=word)
            items = word
        upper = self._upper[: len(items)]
        np.copyto(upper, items, casting="unsafe")
        return upper

    def join(self, kind: Kind, exponents: Bytes, mantissas: Bytes, low: Bytes, out: Bytes) -> None:
        """The inverse of `cut`."""
        if kind.itemsize == 1:
            np.copyto(out, exponents)
            return
        items, lanes = out.view(f"<u{kind.itemsize}"), _lanes(kind, low)
        for part in _parts(len(items)):
            target = items[part]
            a, b = self._upper[: len(target)], self._other[: len(target)]
            np.copyto(a, exponents[part])
            np.left_shift(a, 8, out=a)
            np.copyto(b, mantissas[part])
            np.bitwise_or(a, b, out=a)
            np.right_shift(a, kind.rotation, out=b)
            np.left_shift(a, 16 - kind.rotation, out=a)
            if lanes:
                np.bitwise_or(a, b, out=a)
                self._with_low(a, [lane[part] for lane in lanes], target)
            else:
                np.bitwise_or(a, b, out=target)

    def _with_low(self, upper: Words, lanes: list[Words], target: Words) -> None:
        word, below = (memory.view(target.dtype)[: len(target)] for memory in (self._word, self._wide))
        np.copyto(word, upper)
        for lane in reversed(lanes):
            copy = self._low.view(lane.dtype)[: len(lane)]
            np.copyto(copy, lane)  # a lane in a frame need not be aligned: such a cast is slow, such a copy is not
            np.copyto(below, copy)
            np.left_shift(word, 8 * lane.itemsize, out=word)
            np.bitwise_or(word, below, out=word if lane is not lanes[0] else target)


def _lanes(kind: Kind, low: Bytes) -> list[Words]:
    """The low plane of n elements: n times the lowest 16 bits; of 8 bytes n times the lowest 32, then 16 more."""
    if kind.itemsize == 8:
        cut = len(low) // 6 * 4
        return [low[:cut].view("<u4"), low[cut:].view("<u2")]
    return [low.view("<u2")] if kind.itemsize == 4 else []


def _parts(num_elements: int) -> Iterator[slice]:
    return (slice(at, at + _STEP) for at in range(0, num_elements, _STEP))
