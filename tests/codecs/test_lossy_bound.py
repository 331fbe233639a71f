"""Numbers that are off by more than a frame says are found, wherever they are; bits of NaN and infinity count."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs.lossy_bound import first_beyond
from ckptlib.codecs.lossy_frame import Bound


def by_definition(raw: np.ndarray, rounded: np.ndarray, bound: Bound) -> int | None:
    for at in range(0, len(raw), 256):
        ours, theirs = raw[at : at + 256], rounded[at : at + 256]
        if ours.tobytes() == theirs.tobytes():
            continue
        largest = max(abs(float(x)) for x in ours)
        off = [abs(float(a) - float(b)) for a, b in zip(ours, theirs, strict=True)]
        if not all(x <= bound.absolute and x <= bound.relative * largest for x in off):
            return at
    return None


def found(raw: np.ndarray, rounded: np.ndarray, bound: Bound) -> int | None:
    return first_beyond(memoryview(raw.tobytes()), memoryview(rounded.tobytes()), bound)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_finds_what_is_beyond(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 255, 256, 257, 700, 66_000, 140_000]))
    raw = np.random.default_rng(size).normal(size=size).astype(np.float32)
    rounded = raw + np.float32(2**-8)
    rounded[raw == 0] = 0
    for array in (raw, rounded):
        for at in data.draw(st.lists(st.integers(0, size - 1), max_size=2)):
            array[at] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf, 1.5, 0, 1e30]))
    bound = Bound(data.draw(st.sampled_from([0.0, 0.003, 0.005, 1.0])), data.draw(st.sampled_from([0, 0.001, 0.5])))
    assert found(raw, rounded, bound) == by_definition(raw, rounded, bound)


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_the_same_or_beyond(special: float) -> None:
    raw = np.ones(1000, np.float32)
    raw[700] = special
    bound = Bound(1e30, 1.0)
    assert found(raw, raw.copy(), bound) is None
    other = raw.copy()
    other.view(np.uint32)[700] ^= 1
    assert found(raw, other, bound) == 512


def test_in_a_block_of_zeros_nothing_may_be_off() -> None:
    raw = np.zeros(300, np.float32)
    assert found(raw, raw.copy(), Bound(0.0, 0.0)) is None
    off = raw.copy()
    off[256] = 1e-30
    assert found(raw, off, Bound(1.0, 1.0)) == 256
