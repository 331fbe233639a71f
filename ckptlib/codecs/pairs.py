"""Packs two symbols into a byte: a plane of few different symbols becomes half as many bytes of twice the information.

zstd codes a byte in the same time whatever its information, so that pairs take half the time. Pairs also keep zstd from
finding a match wherever a few frequent symbols recur, which costs more bits than the symbols themselves: exponents of
moments are up to 29 % smaller in pairs than one by one.

15 consecutive symbols, from `base` on, become 0 to 14. Every other symbol is a stray: it becomes 15, and is kept in a
list. The first half of a plane is in the upper four bits, the second half in the lower ones. Pure numpy; knows no
frame.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ckptlib.codecs.float_bits import Bytes

_STRAY = 15
_SAMPLE = 2048
_MOST_STRAYS = 0.02
"""Share of the symbols. With more strays, single symbols are smaller."""


class Pairs(NamedTuple):
    """A plane in pairs."""

    base: int
    strays: Bytes
    """The strays minus `base`, modulo 256; in the order of the plane."""
    packed: Bytes


class Pairer:
    """Packs planes and unpacks them, in memory that it reuses. For one thread at a time."""

    def __init__(self, num_symbols: int) -> None:
        """Allocates memory for planes of up to `num_symbols`."""
        size = -(-num_symbols // 8) * 8
        self._symbols, self._is_stray = np.empty(size, np.uint8), np.zeros(size, np.bool_)
        self._packed = np.empty(-(-num_symbols // 2), np.uint8)

    def pack(self, plane: Bytes) -> Pairs | None:
        """Returns the plane in pairs, or None if it has many symbols. The next call reuses the memory of the result."""
        base = _base(plane)
        if base is None:
            return None
        symbols = self._symbols[: len(plane)]
        np.subtract(plane, base, out=symbols)
        np.greater(symbols, _STRAY - 1, out=self._is_stray[: len(plane)])
        at, some, strays_at = self._strays(len(plane))
        strays = some[strays_at]
        some[strays_at] = _STRAY
        self._symbols.view(np.uint64)[at] = some.view(np.uint64)
        half = -(-len(plane) // 2)
        packed = self._packed[:half]
        np.multiply(symbols[:half], 16, out=packed)  # numpy shifts bytes ten times as slowly
        np.bitwise_or(packed[: len(plane) - half], symbols[half:], out=packed[: len(plane) - half])
        return Pairs(base, strays, packed)

    def unpack(self, pairs: Pairs, plane: Bytes) -> bool:
        """Fills `plane`. Returns False if there are more or fewer strays than places for them."""
        half = len(pairs.packed)
        symbols = self._symbols[: len(plane)]
        np.right_shift(pairs.packed, 4, out=symbols[:half])
        np.bitwise_and(pairs.packed[: len(plane) - half], 15, out=symbols[half:])
        np.equal(symbols, _STRAY, out=self._is_stray[: len(plane)])
        at, some, strays_at = self._strays(len(plane))
        if len(strays_at) != len(pairs.strays):
            return False
        some[strays_at] = pairs.strays
        self._symbols.view(np.uint64)[at] = some.view(np.uint64)
        np.add(symbols, pairs.base, out=plane)
        return True

    def _strays(self, num_symbols: int) -> tuple[NDArray[np.intp], Bytes, NDArray[np.intp]]:
        """Returns which groups of eight symbols have a stray, copies of them, and the strays' positions in these.

        Strays are few, so that eight symbols without one are skipped at once.
        """
        end = -(-num_symbols // 8) * 8
        self._is_stray[num_symbols:end] = False
        masks = self._is_stray[:end].view(np.uint64)
        at = (masks != 0).nonzero()[0]  # as bools: ten times as fast
        return at, self._symbols.view(np.uint64)[at].view(np.uint8), masks[at].view(np.bool_).nonzero()[0]


def _base(plane: Bytes) -> int | None:
    """Returns where the 15 most frequent consecutive symbols begin; None if, in a sample, too many others occur."""
    counts = np.bincount(plane[:: max(1, len(plane) // _SAMPLE)], minlength=256 + _STRAY - 1)
    counts[256:] = counts[: _STRAY - 1]
    sums = np.add.accumulate(counts)
    inside = sums[_STRAY - 1 :] - sums[:256] + counts[:256]
    base = int(inside.argmax())
    return base if inside.item(base) >= (1 - _MOST_STRAYS) * sums.item(255) else None
