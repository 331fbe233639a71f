"""Levels of rows and columns: any come off and go on again; good ones leave little behind."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs.levels import MAX_ROW, MIN_ROW, Leveller, Levels, Model, row_bytes, row_of

SIZE = 40_000
LEVELLER = Leveller(SIZE)
MODELS = st.sampled_from([Model.ROWS, Model.ROWS_AND_COLUMNS])


@settings(deadline=None)
@given(st.integers(1, SIZE), st.integers(MIN_ROW, MAX_ROW), st.data(), MODELS, st.integers(0, 255))
def test_off_and_on(count: int, row: int, data: st.DataObject, model: Model, spread: int) -> None:
    first = data.draw(st.integers(0, row - 1))
    exponents = np.random.default_rng(count).integers(0, spread + 1, count).astype(np.uint8)
    memory = LEVELLER.memory(first, count)
    memory[:] = exponents
    levels = LEVELLER.take_off(first, count, row, model)
    assert len(levels.rows) == row_bytes(first, count, row, model)
    assert len(levels.rows) == len({(first + i) // row for i in range(count)}) * (1 + (model is Model.ROWS_AND_COLUMNS))
    assert len(levels.columns) == (row if model is Model.ROWS_AND_COLUMNS else 0)
    expected = [
        (int(exponents[i]) - level(levels, (first + i) // row, (first + i) % row)) % 256
        for i in {0, count // 3, count - 1}
    ]
    assert [int(memory[i]) for i in {0, count // 3, count - 1}] == expected
    other = Leveller(SIZE)
    other.memory(first, count)[:] = memory
    other.put_on(first, count, row, levels)
    assert (other.memory(first, count) == exponents).all()


def level(levels: Levels, i: int, j: int) -> int:
    """As the docstring has it."""
    if not len(levels.columns):
        return int(levels.rows[i])
    upper, lower = levels.rows[: len(levels.rows) // 2], levels.rows[len(levels.rows) // 2 :]
    return (256 * int(upper[i]) + int(lower[i]) + int(levels.columns[j])) // 16


@pytest.mark.parametrize("first", [0, 1, 99, 150])
@pytest.mark.parametrize("model", [Model.ROWS, Model.ROWS_AND_COLUMNS])
def test_what_all_of_a_row_share_is_taken_off(first: int, model: Model) -> None:
    """Rows that are cut at the ends of a block, too."""
    row, count = 151, 10_000
    places = np.arange(first, first + count)
    exponents = (100 + places // row % 7 + (places % row % 5 if model is Model.ROWS_AND_COLUMNS else 0)).astype(
        np.uint8
    )
    LEVELLER._block[:] = 255  # whatever lay beside it
    LEVELLER.memory(first, count)[:] = exponents
    LEVELLER.take_off(first, count, row, model)
    left = LEVELLER.memory(first, count)[len(exponents) % row :]
    assert len(set(left.tolist())) <= (1 if model is Model.ROWS else 2)


@pytest.mark.parametrize("model", [Model.ROWS, Model.ROWS_AND_COLUMNS])
def test_levels_do_not_tell_of_what_was_there_before(model: Model) -> None:
    """Else one chunk would have another frame each time: of a piece of one row, and of the ends of two."""
    for first, count in ((10, 20), (50, 20), (0, 64)):
        exponents = np.arange(100, 100 + count, dtype=np.uint8)
        found = []
        for before in (0, 255):
            LEVELLER._block[:] = before
            LEVELLER.memory(first, count)[:] = exponents
            levels = LEVELLER.take_off(first, count, 64, model)
            found.append([*map(bytes, (*levels, LEVELLER.memory(first, count)))])
        assert found[0] == found[1]


def test_rows_may_be_far_apart() -> None:
    """As those of frequent words and of words that were never seen are."""
    scales = np.array([0, 120, 7, 255, 60] * 20, np.uint8)
    memory = LEVELLER.memory(0, 6400)
    memory[:] = scales.repeat(64)
    LEVELLER.take_off(0, 6400, 64, Model.ROWS_AND_COLUMNS)
    assert len(set(memory.tolist())) == 1


@pytest.mark.parametrize(
    ("row", "by"),
    [
        (0, 64),
        (1, 64),
        (2, 64),
        (63, 126),
        (64, 64),
        (192, 192),
        (16384, 16384),
        (16385, 3277),
        (50257, 50257 // 29),
        (10**9 + 7, 64),
        (2**31, 16384),
    ],
)
def test_row_of(row: int, by: int) -> None:
    assert row_of(row) == by


@settings(deadline=None)
@given(st.integers(1, 2**62))
def test_row_of_any(row: int) -> None:
    found = row_of(row)
    assert MIN_ROW <= found <= MAX_ROW
    assert found == MIN_ROW or row % found == 0 or found % row == 0
