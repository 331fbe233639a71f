"""float32 numbers as bfloat16: the same range, 8 significant bits, rounded to the nearest, ties to even.

A block is stored raw if a number in it would become infinite by rounding, or is NaN or infinity.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from ckptlib.codecs.lossy_codec import LossyCodec
from ckptlib.codecs.lossy_frame import Bits, Codes, Floats, Rows
from ckptlib.errors import FormatError

_INFINITY = 0x7F80
"""Exponent bits of a code; infinity and NaN have all of them set."""
_FIRST_TOO_LARGE = 0x7F7F8000
"""Bits of the smallest float32 that rounds to infinity."""


class Bfloat16(LossyCodec):
    """Rounds float32 to bfloat16, by integer operations alone."""

    name: ClassVar[str] = "lossy-bfloat16"
    declared: ClassVar[float] = 0.004
    code: ClassVar[npt.DTypeLike] = np.uint16
    scaled: ClassVar[bool] = False

    @override
    def cannot(self, values: Floats, largest: Bits) -> Rows:
        return largest >= _FIRST_TOO_LARGE

    @override
    def to_codes(self, values: Floats, scales: Floats, codes: Codes) -> None:
        bits = values.view(np.uint32)
        np.right_shift(bits, 16, out=codes, casting="unsafe")
        np.bitwise_and(codes, 1, out=codes)
        np.add(bits, 0x7FFF, out=bits)
        np.add(bits, codes, out=bits)  # ties to even: the last bit that stays
        np.right_shift(bits, 16, out=codes, casting="unsafe")

    @override
    def to_values(self, codes: Codes, scales: Floats, values: Floats) -> None:
        bits = values.view(np.uint32)
        np.copyto(bits, codes)
        np.left_shift(bits, 16, out=bits)
        if np.bitwise_and(codes, _INFINITY).max(initial=0) == _INFINITY:
            raise FormatError(f"{self.name}: a code is infinity or NaN; expected these in raw blocks only")
