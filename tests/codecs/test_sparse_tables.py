"""What saves of a table take that is touched by Zipf's law: 1 % of the rows between two saves, values like noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from ckptlib.codecs.codec import Content
from ckptlib.codecs.keyframes import Cycle
from ckptlib.codecs.patch import PatchCodec

CODEC = PatchCodec()
ROW = Content("float32", 64)
NUM_ROWS, ROW_BYTES, CHUNK_ROWS = 1 << 16, 256, 1 << 14

Table = NDArray[np.uint8]


def sample(rng: np.random.Generator, order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Ids of 1 % of the rows, drawn with exponent 1.05."""
    weights = np.arange(1, NUM_ROWS + 1) ** -1.05
    bounds = np.cumsum(weights) / weights.sum()
    found = np.zeros(NUM_ROWS, bool)
    while found.sum() < NUM_ROWS // 100:
        found[order[np.searchsorted(bounds, rng.random(200))]] = True
    return np.flatnonzero(found)


def stored_nbytes(order: NDArray[np.intp], num_saves: int, ends: Callable[[Cycle, int | None], bool]) -> int:
    """By so many saves of the table, each chunk in cycles of its own."""
    rng = np.random.default_rng(0)
    table = rng.integers(0, 256, (NUM_ROWS, ROW_BYTES), dtype=np.uint8)
    bases: dict[int, tuple[Cycle, bytes]] = {}
    total = 0
    for save in range(num_saves):
        ids = sample(rng, order)
        if save:
            table[ids] = rng.integers(0, 256, (len(ids), ROW_BYTES), dtype=np.uint8)
        for start in range(0, NUM_ROWS, CHUNK_ROWS):
            raw = table[start : start + CHUNK_ROWS].tobytes()
            total += store(
                raw, start, bases, not save or bool(((ids >= start) & (ids < start + CHUNK_ROWS)).any()), ends
            )
    return total


def store(
    raw: bytes,
    at: int,
    bases: dict[int, tuple[Cycle, bytes]],
    changed: bool,
    ends: Callable[[Cycle, int | None], bool],
) -> int:
    """Bytes that one save of one chunk takes."""
    if at in bases:
        cycle, base = bases[at]
        if not changed:
            bases[at] = cycle.then(0), base
            return 0
        frame = CODEC.encode(memoryview(raw), memoryview(base), ROW)
        if frame is not None and not ends(cycle, len(frame)):
            bases[at] = cycle.then(len(frame)), base
            return len(frame)
    bases[at] = Cycle(len(raw)), raw
    return len(raw)


ORDERS = {"hashed": np.random.default_rng(7).permutation(NUM_ROWS), "by frequency": np.arange(NUM_ROWS)}


@pytest.mark.parametrize("order", ORDERS)
def test_one_increment_takes_the_touched_rows(order: str) -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, (NUM_ROWS, ROW_BYTES), dtype=np.uint8)
    raw, ids = base.copy(), sample(rng, ORDERS[order])
    raw[ids] = rng.integers(0, 256, (len(ids), ROW_BYTES), dtype=np.uint8)
    total = 0
    for start in range(0, NUM_ROWS, CHUNK_ROWS):
        chunk, before = (memoryview(data[start : start + CHUNK_ROWS].tobytes()) for data in (raw, base))
        total += len(CODEC.encode(chunk, before, ROW) or chunk)
    assert total <= 1.02 * len(ids) * ROW_BYTES


def test_eight_times_fewer_bytes_with_a_keyframe_every_20() -> None:
    total = stored_nbytes(ORDERS["hashed"], 20, lambda cycle, _: cycle.num_saves == 20)
    assert 20 * NUM_ROWS * ROW_BYTES / total >= 8


@pytest.mark.parametrize("order", ORDERS)
def test_eight_times_fewer_bytes_by_measured_size(order: str) -> None:
    total = stored_nbytes(ORDERS[order], 150, Cycle.ends_before)
    assert 150 * NUM_ROWS * ROW_BYTES / total >= 8
