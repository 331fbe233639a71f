"""What a sample of a chunk of floats tells about how to code it. Decides; codes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckptlib.codecs.float_bits import Bytes, Cutter, Kind
from ckptlib.codecs.levels import Model

_ROWS, _COLUMNS = 32, 128
"""Of the sample, at most."""
_ENOUGH = _ROWS * _COLUMNS
_NOISE_BITS = 7.8
"""Per byte. A plane with more is not worth a pass: at best 2.5 % of it are saved."""
_LEVEL_BITS = 6.0
"""What a level costs in a frame, about."""
_WORTH_BITS = 0.03
"""Per element and kind of level: below, it is not worth the work."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Of the planes of one chunk."""

    model: Model
    exponents: bool
    """Whether to code them; they are noise otherwise, and stay as they are. So are the others."""
    mantissas: bool
    low: bool


def plan(kind: Kind, raw: Bytes, first: int, row: int, block: int, cutter: Cutter) -> Plan:
    """From up to 4,096 of the elements in `raw`, of which there is at least one.

    `first`: place of the first one in its row. `row`: elements of which one level is taken off; 0: none is. `block`:
    elements that share their columns' levels.
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
    return Plan(model, bits < _NOISE_BITS, _entropy(mantissas) < _NOISE_BITS, _entropy(low[:_ENOUGH]) < _NOISE_BITS)


def _spread(elements: Bytes, row: int) -> Bytes:
    """Rows that lie apart, of each the first elements; a copy."""
    rows = elements[: len(elements) // row * row].reshape(-1, row, elements.shape[1])
    return np.ascontiguousarray(rows[:: -(-len(rows) // _ROWS), :_COLUMNS])


def _model(exponents: Bytes, row: int, block: int, bits: float) -> tuple[Model, float]:
    """What is best to take off, and the bits of an element then; `bits`: without."""
    of_rows = exponents.mean(axis=1, dtype=np.float32)[:, None]
    by_rows = _entropy((exponents - np.rint(of_rows).astype(np.uint8)).reshape(-1)) + _LEVEL_BITS / row
    of_columns = exponents.mean(axis=0, dtype=np.float32) - of_rows.mean()
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
    """Bits per byte of a source that gave this sample: corrected for its size as Miller and Madow do; none: 8."""
    if not len(plane):
        return 8.0
    counts = np.bincount(plane)
    counts = counts[counts > 0]
    bits = np.log2(len(plane)) - float(counts @ np.log2(counts)) / len(plane)
    return float(bits + (len(counts) - 1) / (2 * np.log(2) * len(plane)))
