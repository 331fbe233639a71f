"""Hashes of rows, beside a definition that multiplies one character at a time."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs.row_hashes import HASH_BYTES, NUM_LANES, hash_rows


def by_definition(row: bytes) -> list[int]:
    """Three sums of characters times keys, their upper halves."""
    row = row.ljust(-(-len(row) // 8) * 8, b"\0")
    characters = [1, *(int.from_bytes(row[at : at + 4], "little") for at in range(0, len(row), 4))]
    stream = hashlib.shake_128(b"ckptlib row hashes").digest(8 * 3 * len(characters))
    keys = [int.from_bytes(stream[at : at + 8], "little") for at in range(0, len(stream), 8)]
    return [
        sum(key * character for key, character in zip(keys[lane::3], characters, strict=True)) % 2**64 >> 32
        for lane in range(3)
    ]


def test_size() -> None:
    assert (NUM_LANES, HASH_BYTES) == (3, 12)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 200), st.integers(0, 5), st.integers(0, 2**32), st.sampled_from([0, 1, 255]))
def test_is_the_definition(nbytes: int, num: int, seed: int, most: int) -> None:
    table = np.random.default_rng(seed).integers(0, 256, (num, nbytes), dtype=np.uint8)
    table[table > most] = 255
    hashes = hash_rows(table)
    assert hashes.shape == (NUM_LANES, num)
    assert hashes.T.tolist() == [by_definition(row.tobytes()) for row in table]


@pytest.mark.parametrize("nbytes", [64, 100, 8192])
def test_blocks_do_not_show(nbytes: int) -> None:
    """More rows than are worked on at once, from an address that no word begins at."""
    num = (1 << 20) // nbytes + 1
    data = np.random.default_rng(0).integers(0, 256, num * nbytes + 3, dtype=np.uint8)
    table = data[3:].reshape(num, nbytes)
    hashes = hash_rows(table)
    for number in (0, 1, num // 2, num - 2, num - 1):
        assert hashes[:, number].tolist() == by_definition(table[number].tobytes())


@cache
def changes() -> dict[str, np.ndarray[tuple[int, int], np.dtype[np.uint8]]]:
    """Rows that weak hashes take for one another: 20,000 or so of each kind, no two alike."""
    rng = np.random.default_rng(1)
    num, width = 20_000, 32
    ones = np.ones((num, width), np.float32)
    signs = np.where(rng.integers(0, 2, (num, width), dtype=bool), ones, -ones)
    exponents = np.exp2(rng.integers(-60, 60, (num, width))).astype(np.float32)
    few = np.zeros((num, width), np.float32)
    few[np.arange(num), rng.integers(0, width, num)] = rng.integers(1, 2**24, num)
    counts = rng.integers(0, 3, (num, width)).astype(np.int64)
    order = np.argsort(rng.random((num, width)), axis=1).astype(np.uint16)
    bits = np.zeros((64 * width, 8 * width), np.uint8)
    bits[np.arange(64 * width), np.arange(64 * width) // 8] = 1 << np.arange(64 * width) % 8
    found = {"signs": signs, "exponents": exponents, "one value": few, "counts": counts, "order": order, "bits": bits}
    return {name: np.unique(rows.view(np.uint8), axis=0) for name, rows in found.items()}


@pytest.mark.parametrize("name", ["signs", "exponents", "one value", "counts", "order", "bits"])
def test_each_32_bits_tell_structured_rows_apart(name: str) -> None:
    """Of 20,000 random numbers of 32 bits, 0.05 pairs are alike: more than 3 would be no accident."""
    rows = changes()[name]
    assert len(rows) > 2000
    for lane in hash_rows(rows):
        assert len(rows) - len(np.unique(lane)) <= 3


def test_lanes_are_independent() -> None:
    """Also of the difference: two rows that one lane confuses are as good as any two for the others."""
    rows = np.random.default_rng(2).integers(0, 256, (200_000, 64), dtype=np.uint8)
    first, second, third = hash_rows(rows)
    pairs = np.argsort(first)
    alike = np.flatnonzero(np.diff(first[pairs].astype(np.int64)) == 0)
    assert len(alike), "some 4 pairs of 200,000 rows should be alike in 32 bits"
    for other in (second, third):
        assert (other[pairs[alike]] != other[pairs[alike + 1]]).all()
