"""Decides from a sample of a chunk of floats how to code it. Codes nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ckptlib.codecs.float_bits import Bytes, Cutter, Kind
from ckptlib.codecs.levels import Model

_ROWS, _COLUMNS = 32, 64
"""The most rows and columns of the sample."""
_ENOUGH = _ROWS * _COLUMNS
_NOISE_BITS = 7.8
"""Bits per byte. A plane with more is not worth a pass: it would save 2.5 % at best."""
_LEVEL_BITS = 6.0
"""Approximate bits that a level costs in a frame."""
_WORTH_BITS = 0.03
"""Bits per element and kind of level. A smaller gain is not worth the work."""


class Way(Enum):
    """How to store a plane."""

    AS_IS = 0
    """For noise."""
    CODED = 1
    WITHOUT_LOWEST_BIT = 2
    """For noise with a lowest bit of 0: mantissas of positive numbers."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How to code the planes of one chunk."""

    model: Model
    exponents: Way
    mantissas: Way
    low: Way

    @property
    def pays(self) -> bool:
        """Whether any plane is worth coding."""
        return {self.exponents, self.mantissas, self.low} != {Way.AS_IS}


def plan(kind: Kind, raw: Bytes, first: int, row: int, block: int, cutter: Cutter) -> Plan:
    """Plans from up to 2,048 of the elements in `raw`, which has at least one.

    `first`: position of the first element in its row. `row`: elements that share a level; 0: no levels are subtracted.
    `block`: elements that share their columns' levels.
    """
    elements = raw.reshape(-1, kind.itemsize)
    rows = elements[-first % row :] if row else elements
    by_rows = row > 0 and len(rows) // row >= _ROWS // 2
    grid = _spread(rows, row) if by_rows else _spread(elements, max(1, len(elements) // _ROWS))
    count = grid.shape[0] * grid.shape[1]
    exponents, mantissas, low = (np.empty(count * size, np.uint8) for size in (1, kind.mantissa_bytes, kind.low_bytes))
    cutter.cut(kind, grid.reshape(-1), exponents, mantissas, low)
    model, bits = Model.NONE, _entropy(exponents)
    if by_rows:
        model, bits = _model(exponents.reshape(grid.shape[:2]), row, block, bits)
    of_mantissas = _way(mantissa_bits := _entropy(mantissas))
    if of_mantissas is Way.CODED and mantissa_bits > _NOISE_BITS - 1 and not (mantissas & 1).any():
        of_mantissas = Way.WITHOUT_LOWEST_BIT
    return Plan(model, _way(bits), of_mantissas, _way(_entropy(low[:_ENOUGH])))


def _way(bits: float) -> Way:
    return Way.CODED if bits < _NOISE_BITS else Way.AS_IS


def _spread(elements: Bytes, row: int) -> Bytes:
    """Returns the first elements of rows that lie apart; a copy."""
    rows = elements[: len(elements) // row * row].reshape(-1, row, elements.shape[1])
    return np.ascontiguousarray(rows[:: -(-len(rows) // _ROWS), :_COLUMNS])


def _model(exponents: Bytes, row: int, block: int, bits: float) -> tuple[Model, float]:
    """Returns the best levels to subtract, and the bits of an element then. `bits`: without levels."""
    of_rows = (np.add.reduce(exponents, axis=1, dtype=np.uint32) / np.float32(exponents.shape[1]))[:, None]
    by_rows = _entropy((exponents - np.rint(of_rows).astype(np.uint8)).reshape(-1)) + _LEVEL_BITS / row
    of_columns = np.add.reduce(exponents, axis=0, dtype=np.uint32) / np.float32(len(exponents))
    of_columns -= np.add.reduce(of_columns) / np.float32(len(of_columns))
    both = np.rint(of_rows + of_columns).astype(np.int16).astype(np.uint8)
    # means of few rows follow the sample itself, and seem to save half of log2(1 - 1 / rows) bits more than they will
    doubt = 0.72 / len(exponents)
    by_both = _entropy((exponents - both).reshape(-1)) + _LEVEL_BITS * (1 / row + row / block) + doubt
    choices = {
        Model.NONE: bits,
        Model.ROWS: by_rows + _WORTH_BITS,
        Model.ROWS_AND_COLUMNS: by_both + 2 * _WORTH_BITS,
    }
    model = min(choices, key=choices.__getitem__)
    return model, choices[model]


def _entropy(plane: Bytes) -> float:
    """Returns the bits per byte of a sample's source, corrected for its size by Miller and Madow; 8 if it is empty."""
    if not len(plane):
        return 8.0
    counts = np.bincount(plane, minlength=256)
    bits = math.log2(len(plane)) - float(np.add.reduce(_BITS.take(counts))) / len(plane)
    return bits + (int(np.count_nonzero(counts)) - 1) / (2 * math.log(2) * len(plane))


_BITS = np.arange(_ENOUGH + 1) * np.log2(np.maximum(1, np.arange(_ENOUGH + 1)))
"""By count: the count times its logarithm to base 2."""
