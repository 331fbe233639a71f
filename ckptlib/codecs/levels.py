"""Levels: the exponents that a row or a column has in common. Subtracting them leaves values that need fewer bits.

A row of an optimizer's moments has the scale of one output's gradients, and a column that of one input's. So the level
of an element is the sum of its row's and its column's. Exponents are bytes, and wrap around: any levels give the same
exponents back, good ones only in fewer bits. Pure numpy; knows no floats and no frames.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ckptlib.codecs.float_bits import Bytes

MAX_ROW = 1 << 14
"""Longer rows are cut into equal pieces."""
MIN_ROW = 64
"""A level costs some 6 bits, so that shorter rows share one."""
_ROWS_SEEN = 64
"""The level of a column is computed from fewer than twice as many rows."""


class Model(IntEnum):
    """The kind of levels that are subtracted; a number in frames."""

    NONE = 0
    ROWS = 1
    ROWS_AND_COLUMNS = 2


NO_COLUMNS = np.empty(0, np.uint8)


class Levels(NamedTuple):
    """The levels of the rows that a block lies in, whole or in part."""

    rows: Bytes
    """Level of the elements of each row. With columns, two bytes for each row, the upper bytes first."""
    columns: Bytes
    """Empty, or one for each element of a row. An element's level is then the sum of its row's and its column's,
    divided by 16 and rounded down: levels in whole exponents would be off by half an exponent each."""


def row_of(row: int) -> int:
    """Returns how many elements share a level in a tensor with rows of `row`; from MIN_ROW to MAX_ROW."""
    if row < MIN_ROW:
        return row * -(-MIN_ROW // row) if row > 0 else MIN_ROW
    fewest = -(-row // MAX_ROW)
    return next((row // pieces for pieces in range(fewest, fewest + 64) if row % pieces == 0), MIN_ROW)


def num_rows(first: int, count: int, row: int) -> int:
    """Returns in how many rows `count` elements lie; `first` is the position of the first one in its row."""
    return -(-(first + count) // row)


def row_bytes(first: int, count: int, row: int, model: Model) -> int:
    """Returns the bytes of `Levels.rows` for these elements."""
    return num_rows(first, count, row) * (2 if model is Model.ROWS_AND_COLUMNS else 1)


class Leveller:
    """Finds levels, subtracts them and adds them again, in memory that it reuses. For one thread at a time."""

    def __init__(self, num_elements: int) -> None:
        """Allocates memory for blocks of up to `num_elements`."""
        size = num_elements + 2 * MAX_ROW
        self._block = np.zeros(size, np.uint8)
        self._levels = np.empty(size, np.uint8)

    def memory(self, first: int, count: int) -> Bytes:
        """Returns memory for `count` exponents, the first of which is that of element `first` of its row. Every call
        returns the same memory."""
        return self._block[first : first + count]

    def take_off(self, first: int, count: int, row: int, model: Model) -> Levels:
        """Subtracts the levels from the exponents in `memory(first, count)` and returns them."""
        grid = self._grid(first, count, row)
        self._fill_margins(first, count, row)
        some = grid[:, :: -(-row // 256)]  # 256 bytes at most, so that their sum has 16 bits
        means = np.add.reduce(some, axis=1, dtype=np.uint16) / np.float32(some.shape[1])
        if model is Model.ROWS:
            levels = Levels(np.rint(means).astype(np.uint8), NO_COLUMNS)
        else:
            some = grid[:: max(1, len(grid) // _ROWS_SEEN)]
            of_columns = np.add.reduce(some, axis=0, dtype=np.uint32) / np.float32(len(some))
            of_columns = np.rint(16 * (of_columns - of_columns.mean())) + 128
            of_rows = np.rint(16 * means).astype(np.int64) + 8 - 128  # 8: a half, to round; 128: the columns' own
            levels = Levels(
                np.concatenate([of_rows >> 8, of_rows & 255]).astype(np.uint8),
                np.clip(of_columns, 0, 255).astype(np.uint8),
            )
        self._apply(np.subtract, grid, levels)
        return levels

    def put_on(self, first: int, count: int, row: int, levels: Levels) -> None:
        """Adds the levels that `take_off` subtracted."""
        self._apply(np.add, self._grid(first, count, row), levels)

    def _grid(self, first: int, count: int, row: int) -> Bytes:
        rows = num_rows(first, count, row)
        grid: Bytes = self._block[: rows * row].reshape(rows, row)
        return grid

    def _fill_margins(self, first: int, count: int, row: int) -> None:
        """Fills the rest of the first and the last row with means, which do not move those of the exponents."""
        end = first + count
        if first:
            self._block[:first] = self._block[first : min(row, end)].mean()
        if end % row:
            last = end - end % row
            self._block[end : last + row] = self._block[max(first, last) : end].mean()

    def _apply(self, operation: np.ufunc, grid: Bytes, levels: Levels) -> None:
        if not len(levels.columns):
            operation(grid, levels.rows[:, None], out=grid)
            return
        # a row's level is whole exponents and sixteenths; for each number of sixteenths the columns' levels are the
        # same
        upper, lower = levels.rows.reshape(2, -1)
        by_sixteenths = np.greater_equal(levels.columns & 15, _TO_A_WHOLE).view(np.uint8)
        np.add(by_sixteenths, levels.columns >> 4, out=by_sixteenths)
        level = self._levels[: grid.size].reshape(grid.shape)
        np.take(by_sixteenths, lower & 15, axis=0, out=level, mode="clip")  # other modes fill a copy of `out` first
        operation(grid, level, out=grid)
        operation(grid, (upper * 16 + (lower >> 4))[:, None], out=grid)


_TO_A_WHOLE = np.arange(16, 0, -1, dtype=np.uint8)[:, None]
"""What 0 to 15 sixteenths lack to a whole."""
