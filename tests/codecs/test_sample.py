"""What a sample says about chunks of which it is known what they are."""

from __future__ import annotations

import numpy as np
import pytest
from chunks import gaussian, moments

from ckptlib.codecs.float_bits import KINDS, Cutter
from ckptlib.codecs.levels import Model
from ckptlib.codecs.sample import Plan, Way, plan

CUTTER = Cutter(2048)


def of(raw: bytes, row: int = 0, first: int = 0, dtype: str = "float32") -> Plan:
    items = np.frombuffer(raw, np.uint8)
    return plan(KINDS[dtype], items, first, row, len(items) // KINDS[dtype].itemsize, CUTTER)


@pytest.mark.parametrize("row", [0, 64, 100])
def test_weights(row: int) -> None:
    assert of(gaussian("float32", 100_000), row) == Plan(Model.NONE, Way.CODED, Way.AS_IS, Way.AS_IS)
    assert of(gaussian("bfloat16", 100_000), row, dtype="bfloat16").exponents is Way.CODED


@pytest.mark.parametrize("first", [0, 77])
def test_moments(first: int) -> None:
    raw = moments(300, 100)[4 * first :]
    assert of(raw, 100, first) == Plan(Model.ROWS_AND_COLUMNS, Way.CODED, Way.WITHOUT_LOWEST_BIT, Way.AS_IS)
    assert of(moments(10, 100), 100).model is Model.NONE, "too few rows to tell"


def test_rows_alone() -> None:
    random = np.random.default_rng(0)
    rows = random.normal(0, 1, (300, 100)) * np.exp2(random.normal(0, 4, (300, 1)))
    assert of(rows.astype("<f4").tobytes(), 100).model is Model.ROWS


def test_noise_and_zeros() -> None:
    assert not of(np.random.default_rng(0).bytes(400_000), 100).pays
    assert of(bytes(400_000), 100) == Plan(Model.NONE, Way.CODED, Way.CODED, Way.CODED)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float8_e5m2"])
def test_any_size(count: int, dtype: str) -> None:
    for row in (0, 64, 16384):
        assert of(bytes(count * KINDS[dtype].itemsize), row, row // 2, dtype).pays
