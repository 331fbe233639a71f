"""float32 numbers as bfloat16: the same range, 8 significant bits, rounded to the nearest, ties to even.

A block in which a number would become infinite by rounding is stored raw, as is one with NaN or infinity.
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
"""Of codes: this exponent has infinity and NaN."""
_FIRST_TOO_LARGE = 0x7F7F8000
"""Of float32's bits: from here on, rounding gives infinity."""


class Bfloat16(LossyCodec):
    """Integer operations alone."""

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
