"""Even bytes give up their lowest bit, and get it back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs import sevenths


@settings(deadline=None)
@given(st.lists(st.integers(0, 127), min_size=1, max_size=200))
def test_there_and_back(halves: list[int]) -> None:
    plane = np.array(halves, np.uint8) * 2
    packed = sevenths.pack(plane)
    assert packed is not None
    assert len(packed) == sevenths.packed_bytes(len(plane))
    assert sevenths.unpack(packed, len(plane)).tolist() == plane.tolist()


def test_what_stands_where() -> None:
    packed = sevenths.pack(np.array([2, 4, 6, 8, 10, 12, 14, 0b10010110], np.uint8))
    assert packed is not None
    assert packed.tolist() == [2 | 1, 4 | 1, 6 | 0, 8 | 1, 10 | 0, 12 | 0, 14 | 1]


@pytest.mark.parametrize("at", [0, 500, 999])
def test_an_odd_byte_does_not_fit(at: int) -> None:
    plane = np.zeros(1000, np.uint8)
    plane[at] = 1
    assert sevenths.pack(plane) is None
