"""Codecs that keep fewer than all bits of float32 numbers, within a bound that each declares and checks. Opt-in only.

A block that a codec cannot hold within its bound is stored raw, bit for bit: one with NaN or infinity, one whose
largest value is close to the denormal numbers, and any that turns out to be off by more when it is decoded again. So
the bound holds by construction, and the frame records the largest actual error.

Decoders use integer operations and single float32 multiplications with no denormal result, so they give the same bits
on every machine. Decoded numbers are encoded as the same codes again.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ckptlib.codecs.codec import Codec, Content
from ckptlib.codecs.lossy_frame import (
    BLOCK,
    SMALLEST,
    Bits,
    Bound,
    Codes,
    Floats,
    Rows,
    Shape,
    bound_of,
    build,
    num_in,
    parse,
)
from ckptlib.errors import FormatError

_SLAB = 256
"""Blocks worked on at a time: with codes and errors they fit into the second-level cache of a core."""
_PAYS = 0.98
_LOWEST, _INFINITY = np.array([SMALLEST, np.inf], np.float32).view(np.uint32)


class LossyCodec(Codec):
    """Encodes blocks of float32 numbers as codes, which subclasses define. Leaves other dtypes to be stored raw."""

    lossless: ClassVar[bool] = False
    declared: ClassVar[float]
    """The largest error that a number may have, as a fraction of the largest absolute value in its block of 256."""
    code: ClassVar[npt.DTypeLike]
    """uint8 or uint16."""
    scaled: ClassVar[bool]
    """Whether the frame holds the largest absolute value of each block."""

    @abstractmethod
    def to_codes(self, values: Floats, scales: Floats, codes: Codes) -> None:
        """Fills `codes` for `values`, a block per row. May overwrite `values`.

        `scales`: the largest absolute value of each row, as a column; 1 in a row of zeros. All values are finite.
        """

    @abstractmethod
    def to_values(self, codes: Codes, scales: Floats, values: Floats) -> None:
        """Fills `values` with the numbers of the codes. Raises FormatError for a code that `to_codes` never gives."""

    def cannot(self, values: Floats, largest: Bits) -> Rows:
        """Returns which rows it has no codes for. `largest`: bits of the largest absolute value of each row."""
        return np.zeros(len(largest), np.bool_)

    def bound(self, frame: memoryview) -> Bound:
        """Returns the largest errors in a frame. Raises FormatError for a frame that claims more than `declared`."""
        return bound_of(frame, self.declared)

    @override
    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        if content.dtype != "float32" or raw.nbytes % 4 or not raw.nbytes:
            return None
        given = np.frombuffer(raw, "<f4")
        shape = Shape(len(given), self.code, self.scaled)
        most = int(raw.nbytes * _PAYS)
        scales, is_raw = np.zeros(shape.num_blocks, np.float32), np.zeros(shape.num_blocks, np.bool_)
        codes = np.empty(len(given), self.code)
        kept: list[bytes] = []
        worst, slab = Bound(0.0, 0.0), _Slab(self)
        for first in range(0, shape.num_blocks, _SLAB):
            blocks = slice(first, min(first + _SLAB, shape.num_blocks))
            values = slice(first * BLOCK, min((first + _SLAB) * BLOCK, len(given)))
            bound = slab.encode(given[values], scales[blocks], is_raw[blocks], codes[values])
            worst = Bound(max(worst.absolute, bound.absolute), max(worst.relative, bound.relative))
            kept.append(slab.raw(is_raw[blocks], values.stop - values.start))
            if shape.num_bytes() + sum(map(len, kept)) > most:
                return None
        return build(shape, worst, scales, codes, is_raw, b"".join(kept))

    @override
    def decode(self, frame: memoryview, out: memoryview) -> None:
        if out.nbytes % 4 or not out.nbytes:
            raise FormatError(f"{self.name} codes float32 numbers; a chunk of {out.nbytes} bytes is none of them")
        self.bound(frame)
        found = np.frombuffer(out, "<f4")
        shape = Shape(len(found), self.code, self.scaled)
        views, is_raw = parse(frame, shape)
        scales = views.scales if self.scaled else np.zeros(shape.num_blocks, np.float32)
        slab, taken = _Slab(self), 0
        for first in range(0, shape.num_blocks, _SLAB):
            blocks = slice(first, min(first + _SLAB, shape.num_blocks))
            values = slice(first * BLOCK, min((first + _SLAB) * BLOCK, len(found)))
            size = 4 * num_in(is_raw[blocks], values.stop - values.start)
            slab.decode(views.codes[values], scales[blocks], is_raw[blocks], views.raw[taken : taken + size])
            slab.give(found[values])
            taken += size


class _Slab:
    """Memory for some blocks, reused for the next ones."""

    def __init__(self, codec: LossyCodec) -> None:
        self._codec = codec
        self._given, self._coded, self._errors = np.empty((3, _SLAB, BLOCK), np.float32)
        self._codes: Codes = np.empty((_SLAB, BLOCK), codec.code)

    def encode(self, given: Floats, scales: Floats, is_raw: Rows, codes: Codes) -> Bound:
        """Fills scales, is_raw and codes. Returns the largest errors of the blocks that are coded, rounded up."""
        rows = len(scales)
        wanted, coded, errors = self._given[:rows], self._coded[:rows], self._errors[:rows]
        _fill(wanted, given)
        largest: Bits = np.bitwise_and(wanted.view(np.uint32), 0x7FFFFFFF, out=errors.view(np.uint32)).max(axis=1)
        np.logical_or(largest >= _INFINITY, (largest > 0) & (largest < _LOWEST), out=is_raw)
        np.logical_or(is_raw, self._codec.cannot(wanted, largest), out=is_raw)
        np.copyto(coded, wanted)
        coded[is_raw] = 0
        largest[is_raw] = 0
        scales[:] = largest.view(np.float32)
        divisors = np.where(largest > 0, scales, np.float32(1))[:, np.newaxis]
        self._codec.to_codes(coded, divisors, self._codes[:rows])
        self._codec.to_values(self._codes[:rows], divisors, coded)
        with np.errstate(invalid="ignore", over="ignore"):  # raw blocks
            np.abs(np.subtract(wanted, coded, out=errors), out=errors)
        absolute = errors.max(axis=1).astype(np.float64) * (1 + 2.0**-22)  # the subtraction rounds, too
        relative = absolute / divisors[:, 0]
        np.logical_or(is_raw, ~(relative <= self._codec.declared), out=is_raw)
        scales[is_raw] = 0
        self._codes[:rows][is_raw] = 0
        codes[:] = self._codes.reshape(-1)[: len(codes)]
        fine = ~is_raw
        return Bound(float(absolute.max(where=fine, initial=0)), float(relative.max(where=fine, initial=0)))

    def raw(self, is_raw: Rows, num_values: int) -> bytes:
        """Returns the numbers of the raw blocks among those that were encoded last."""
        return self._given[: len(is_raw)][is_raw].tobytes()[: 4 * num_in(is_raw, num_values)]

    def decode(self, codes: Codes, scales: Floats, is_raw: Rows, raw: npt.NDArray[np.uint8]) -> None:
        """Decodes blocks; `give` returns their numbers."""
        rows = len(scales)
        _fill(self._codes[:rows], codes)
        self._codec.to_values(self._codes[:rows], scales[:, np.newaxis], self._coded[:rows])
        if len(raw):
            blocks = np.zeros(int(is_raw.sum()) * 4 * BLOCK, np.uint8)
            blocks[: len(raw)] = raw
            self._coded[:rows].view(np.uint32)[is_raw] = blocks.view(np.uint32).reshape(-1, BLOCK)

    def give(self, out: Floats) -> None:
        """Fills `out` with the numbers decoded last."""
        out.view("<u4")[:] = self._coded.view(np.uint32).reshape(-1)[: len(out)]


def _fill(rows: npt.NDArray[np.generic], given: npt.NDArray[np.generic]) -> None:
    """Copies `given` into the rows, with zeros behind it in the last one."""
    flat = rows.reshape(-1)
    flat[: len(given)] = given
    flat[len(given) :] = 0
