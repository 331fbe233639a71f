"""Checks that rounded numbers are as close to the saved ones as a frame says. Shares no code with encoders."""

from __future__ import annotations

import numpy as np

from ckptlib.codecs.lossy_frame import BLOCK, Bound, Floats

_SLAB = 256 * BLOCK
"""Numbers compared at a time: they fit into the second-level cache of a core."""


def first_beyond(raw: memoryview, rounded: memoryview, bound: Bound) -> int | None:
    """Returns the position of the first block in which a number is off by more than `bound`; None if there is none.

    Both are float32 numbers, equally many. NaN and infinity must have the same bits.
    """
    ours, theirs = np.frombuffer(raw, "<f4"), np.frombuffer(rounded, "<f4")
    for at in range(0, len(ours), _SLAB):
        beyond = _beyond(ours[at : at + _SLAB], theirs[at : at + _SLAB], bound)
        if beyond is not None:
            return at + beyond
    return None


def _beyond(ours: Floats, theirs: Floats, bound: Bound) -> int | None:
    starts = np.arange(0, len(ours), BLOCK)
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.maximum.reduceat(np.abs(ours - theirs), starts).astype(np.float64)
        largest = np.maximum.reduceat(np.abs(ours), starts).astype(np.float64)
        fine = (off <= bound.absolute) & (off <= bound.relative * largest)
    for block in np.flatnonzero(~fine).tolist():
        numbers = slice(BLOCK * block, BLOCK * (block + 1))
        if not np.array_equal(ours[numbers].view(np.uint32), theirs[numbers].view(np.uint32)):
            return BLOCK * block
    return None
