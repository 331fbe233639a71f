"""Pairs of symbols: all of them come back, and the few that stray."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs.pairs import Pairer

PAIRER = Pairer(3000)


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 255), st.integers(0, 60), st.integers(0, 2**32 - 1))
def test_there_and_back(count: int, base: int, num_strays: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    plane = (random.binomial(14, 0.4, count) + base).astype(np.uint8)
    plane[random.integers(0, count, num_strays)] = random.integers(0, 256, num_strays)
    pairs = PAIRER.pack(plane)
    if pairs is None:
        assert num_strays > 0
        return
    assert len(pairs.packed) == (count + 1) // 2
    out = np.full(count, 0xA5, np.uint8)
    strays, packed = pairs.strays.copy(), pairs.packed.copy()
    assert Pairer(3000).unpack(pairs._replace(strays=strays, packed=packed), out)
    assert (out == plane).all()


def test_what_stands_where() -> None:
    pairs = Pairer(8).pack(np.array([3, 4, 5, 9, 6, 3, 5], np.uint8))
    assert pairs is not None
    assert (pairs.base, pairs.packed.tolist()) == (0, [0x36, 0x43, 0x55, 0x90])
    plane = np.full(100, 252, np.uint8)
    plane[[10, 60, 61]] = 10, 250, 11
    pairs = Pairer(100).pack(plane)
    assert pairs is not None
    assert (pairs.base, pairs.strays.tolist()) == (238, [28, 29])
    assert pairs.packed[[0, 9, 10, 11]].tolist() == [0xEE, 0xEE, 0xFC, 0xEF]


@pytest.mark.parametrize("wrong", [-1, 1, 5])
def test_as_many_strays_as_places(wrong: int) -> None:
    plane = np.full(1000, 7, np.uint8)
    plane[[5, 500, 999]] = 200
    pairs = PAIRER.pack(plane)
    assert pairs is not None
    assert len(pairs.strays) == 3
    strays = np.zeros(3 + wrong, np.uint8)
    assert not PAIRER.unpack(pairs._replace(strays=strays), np.empty(1000, np.uint8))


def test_many_symbols_are_not_paired() -> None:
    assert PAIRER.pack(np.arange(3000).astype(np.uint8)) is None
