"""Differences between floats and their predictions, as integers: small if the prediction is good, and exact.

Floats are handled as words, their bit patterns: uint32 for float32, uint16 for bfloat16. Predictions from the same
floats give the same words on any machine: numpy's single operations are IEEE's and are not contracted, and this module
fixes the other bits of a NaN, in which processors differ. Only denormals may differ, see `flushes_denormals`.
Works on arrays that fit into a cache, and allocates nothing for each. No files, no torch.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = "npt.NDArray[np.uint32] | npt.NDArray[np.uint16]"
Floats: TypeAlias = "npt.NDArray[np.float32]"
Bytes: TypeAlias = "npt.NDArray[np.uint8]"

MOST_NARROW = 127
"""The largest absolute value of a residual that takes one signed byte."""

EXCEPTION = 0x80
"""The unsigned byte that marks a residual which takes more."""

_NAN = 0x7FC00000
_SIGNED: dict[int, type[np.int32] | type[np.int16]] = {4: np.int32, 2: np.int16}


class Scratch:
    """Memory for the operations on arrays of up to `size` elements; for one thread."""

    def __init__(self, size: int) -> None:
        self.floats = [np.empty(size, np.float32) for _ in range(3)]
        """Free memory for predictions."""
        self._words = {dtype: np.empty(size, dtype) for dtype in (np.dtype(np.uint32), np.dtype(np.uint16))}
        self._zigzag = {dtype: np.empty(size, dtype) for dtype in self._words}

    def residual(self, words: Words, predicted: Floats) -> Words:
        """Returns zigzagged residuals: 0, -1, 1, -2, ... become 0, 1, 2, 3, ... Overwrites `predicted`; the next call
        overwrites the result."""
        signed = self._difference(words, predicted)
        signs = self._zigzag[words.dtype][: len(words)].view(signed.dtype)
        np.right_shift(signed, 8 * words.itemsize - 1, out=signs)
        np.left_shift(signed, 1, out=signed)
        np.bitwise_xor(signed, signs, out=signed)
        return signed.view(words.dtype)

    def narrow(self, words: Words, predicted: Floats, out: Bytes) -> bool:
        """Fills `out` with one byte per residual; returns whether there are exceptions. Overwrites `predicted`."""
        signed = self._difference(words, predicted)
        np.copyto(out, signed, casting="unsafe")
        if signed.max() <= MOST_NARROW and signed.min() >= -MOST_NARROW:
            return False
        out[(signed > MOST_NARROW) | (signed < -MOST_NARROW)] = EXCEPTION
        return True

    def room(self, like: Words) -> Words:
        """Returns memory for residuals that are to be `restored`."""
        return self._words[like.dtype][: len(like)]

    def restore(self, residual: Words, predicted: Floats, out: Words) -> None:
        """Fills `out` with the words that have this residual. Overwrites `residual` and `predicted`."""
        signed = residual.view(_SIGNED[residual.itemsize])
        signs = self._zigzag[residual.dtype][: len(residual)].view(signed.dtype)
        np.bitwise_and(signed, 1, out=signs)
        np.negative(signs, out=signs)
        np.right_shift(residual, 1, out=residual)
        np.bitwise_xor(signed, signs, out=signed)
        np.add(residual, self._words_of(predicted, residual.dtype), out=out)

    def restore_narrow(self, residual: Bytes, predicted: Floats, out: Words) -> None:
        """Does what `restore` does, for the bytes that `narrow` gave. The words of exceptions are undefined."""
        signed = _SIGNED[out.itemsize]
        np.add(self._words_of(predicted, out.dtype).view(signed), residual.view(np.int8), out=out.view(signed))

    def _difference(self, words: Words, predicted: Floats) -> npt.NDArray[np.signedinteger[Any]]:
        found = self._words[words.dtype][: len(words)]
        np.subtract(words, self._words_of(predicted, words.dtype), out=found)
        return found.view(_SIGNED[found.itemsize])

    def _words_of(self, predicted: Floats, dtype: np.dtype[np.uint32] | np.dtype[np.uint16]) -> Words:
        """Returns the words of `predicted`, rounded to nearest, ties to even, if words are narrower than floats."""
        words = predicted.view(np.uint32)
        if np.isnan(predicted.max()):  # one pass, and rarely a second
            np.copyto(words, _NAN, where=np.isnan(predicted))
        if dtype.itemsize == 4:
            return words
        odd = self._zigzag[np.dtype(np.uint32)][: len(words)]
        np.right_shift(words, 16, out=odd)
        np.bitwise_and(odd, 1, out=odd)
        np.add(odd, 0x7FFF, out=odd)
        np.add(words, odd, out=words)
        np.right_shift(words, 16, out=words)
        narrow = self._zigzag[np.dtype(np.uint16)][: len(words)]
        np.copyto(narrow, words, casting="unsafe")
        return narrow


def floats_of(words: Words, room: Floats) -> Floats:
    """Returns the floats that these words are: the same memory for float32, `room` filled for bfloat16."""
    if words.itemsize == 4:
        return words.view(np.float32)
    wide = room[: len(words)].view(np.uint32)
    np.copyto(wide, words)
    np.left_shift(wide, 16, out=wide)
    return wide.view(np.float32)


def flushes_denormals() -> bool:
    """Returns whether this thread takes denormals for zeros: torch.set_flush_denormal(True) affects numpy, too."""
    tiny = np.full(8, 1e-40, np.float32)
    return not bool((tiny * np.float32(1)).any())
