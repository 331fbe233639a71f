"""One byte per number: linear codes for numbers of both signs, logarithmic ones for sums of squares.

Optimizers divide by sums of squares: Adam steps by exp_avg / (sqrt(exp_avg_sq) + eps). Linear codes would round
everything that is small beside the largest value of a block to zero, and the next step there would be exp_avg / eps. So
the logarithmic codes have none between 0 and their smallest: positive numbers stay positive, and those below the
smallest code become too large rather than 0.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ckptlib.codecs.lossy_codec import LossyCodec
from ckptlib.codecs.lossy_frame import Bits, Codes, Floats, Rows
from ckptlib.errors import FormatError

_MOST = 127
_PER_127 = np.float32(float.fromhex("0x1.020408p-7"))
"""1/127, rounded. 127 times this is 1 after rounding: the largest number of a block keeps all its bits."""

_OCTAVE = (  # 2**(i/8), rounded to float32
    "0x1.000000p0",
    "0x1.172b84p0",
    "0x1.306fe0p0",
    "0x1.4bfdaep0",
    "0x1.6a09e6p0",
    "0x1.8ace54p0",
    "0x1.ae89fap0",
    "0x1.d5818ep0",
)
_INDEX_BITS = 14
"""Low bits of a float32 that the table of the encoder ignores. It keeps 9 bits of the mantissa."""


class Linear8(LossyCodec):
    """Encodes numbers as multiples of 1/127 of the largest absolute value in a block."""

    name: ClassVar[str] = "lossy8-linear"
    declared: ClassVar[float] = 0.004
    code: ClassVar[npt.DTypeLike] = np.uint8
    scaled: ClassVar[bool] = True

    @override
    def to_codes(self, values: Floats, scales: Floats, codes: Codes) -> None:
        np.divide(values, scales, out=values)  # not by a reciprocal: that of a large scale is denormal
        np.multiply(values, np.float32(_MOST), out=values)
        np.copyto(codes.view(np.int8), np.rint(values, out=values), casting="unsafe")

    @override
    def to_values(self, codes: Codes, scales: Floats, values: Floats) -> None:
        signed = codes.view(np.int8)
        if signed.min(initial=0) < -_MOST:
            raise FormatError(f"{self.name}: a code is {signed.min()}; expected -{_MOST} to {_MOST}")
        np.multiply(signed, _PER_127, out=values, dtype=np.float32)
        np.multiply(values, scales, out=values)


class Logarithmic8(LossyCodec):
    """Has eight codes per octave for the 31.75 octaves below the largest value of a block, and 0. Nothing negative.

    Numbers in these octaves are off by 4.5 % at most. Smaller ones become the smallest code.
    """

    name: ClassVar[str] = "lossy8-log"
    declared: ClassVar[float] = 0.042
    code: ClassVar[npt.DTypeLike] = np.uint8
    scaled: ClassVar[bool] = True

    @override
    def cannot(self, values: Floats, largest: Bits) -> Rows:
        return np.asarray(np.signbit(values).any(axis=1))

    @override
    def to_codes(self, values: Floats, scales: Floats, codes: Codes) -> None:
        is_zero = values.view(np.uint32) == 0  # not values == 0: denormals are no zeros, flush-to-zero or not
        np.divide(values, scales, out=values)
        bits = values.view(np.uint32)
        _nearest().take(np.right_shift(bits, _INDEX_BITS, out=bits), out=codes, mode="clip")
        codes[is_zero] = 0

    @override
    def to_values(self, codes: Codes, scales: Floats, values: Floats) -> None:
        levels().take(codes, out=values, mode="clip")
        np.multiply(values, scales, out=values)


@cache
def levels() -> Floats:
    """Returns the fraction of the scale that each code stands for. Powers of two multiply without rounding."""
    octave = np.array([float.fromhex(text) for text in _OCTAVE], np.float32)
    octaves = octave * np.ldexp(np.float32(1), np.arange(-32, 0, dtype=np.int32))[:, np.newaxis]
    found = np.empty(256, np.float32)
    found[0], found[1:255], found[255] = 0, octaves.reshape(-1)[2:], 1
    return found


@cache
def _nearest() -> npt.NDArray[np.uint8]:
    """Returns the code of the nearest level, never that of 0, by the high bits of a fraction of the scale."""
    bits = np.arange((int(np.float32(1).view(np.uint32)) >> _INDEX_BITS) + 1, dtype=np.uint32) << _INDEX_BITS
    middle = (bits | (1 << (_INDEX_BITS - 1))).view(np.float32)
    positive = levels()[1:]
    return (np.searchsorted((positive[1:] + positive[:-1]) / 2, middle) + 1).astype(np.uint8)
