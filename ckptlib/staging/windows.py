"""Samples a window of each tensor in host memory, at places drawn anew each time. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ckptlib.staging.pieces import Pieces, Scratch

SAMPLE_BYTES = 128
"""Bytes of each tensor's window; a write to a whole tensor that leaves its window alone is not to be expected. One
window, not several: the first access to a page that was not touched lately costs more than all the rest (0.5 us)."""


class Sample(NamedTuple):
    """A window of each tensor, as it was when it was looked at."""

    offsets: list[int]
    """Where each window begins in its tensor."""
    data: bytes
    """The bytes of all windows, one after the other."""

    def window(self, i: int) -> bytes:
        """Returns the window of the tensor with this index."""
        return self.data[i * SAMPLE_BYTES : (i + 1) * SAMPLE_BYTES]


class Windows:
    """The windows of tensors that stay where they are. The owner keeps their memory alive."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """`sizes`: of the tensors, in bytes; none is smaller than its window."""
        self._addresses = np.array(addresses, np.uint64)
        self._rooms = np.array(sizes, np.uint64) - (SAMPLE_BYTES - 1)
        self._pieces = Pieces(addresses, [SAMPLE_BYTES] * len(sizes))

    def look(self, random: np.random.Generator, scratch: Scratch) -> Sample:
        """Returns a sample of the tensors as they are now."""
        offsets = (random.random(len(self._rooms)) * self._rooms).astype(np.uint64)
        self._pieces.aim(self._addresses + offsets)
        return Sample(offsets.tolist(), bytes(scratch.gather(self._pieces)))
