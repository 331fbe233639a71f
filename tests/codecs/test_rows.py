"""Rows of a chunk: every byte is in one row or in an edge, and rows begin where those of the tensor do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.codecs.codec import Content
from ckptlib.codecs.rows import MAX_ROW_BYTES, MIN_ROW_BYTES, PIECE_BYTES, Rows, cut
from ckptlib.format import dtypes

DTYPES = {"uint8": 1, "bfloat16": 2, "float32": 4, "float64": 8, "complex128": 16}


@given(st.sampled_from(sorted(DTYPES)), st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 200_000))
def test_edges_and_rows_are_the_chunk(dtype: str, row: int, lead: int, nbytes: int) -> None:
    rows = cut(Content(dtype, row, -lead % max(row, 1)), nbytes)
    if rows is None:
        assert nbytes < 2 * max(MAX_ROW_BYTES, MIN_ROW_BYTES)
        return
    assert MIN_ROW_BYTES <= rows.nbytes <= MAX_ROW_BYTES
    assert 0 <= rows.lead < rows.nbytes
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    first, last = rows.edges(memoryview(data))
    table = rows.table(memoryview(data))
    assert table.shape == (rows.num, rows.nbytes)
    assert first.tobytes() + table.tobytes() + last.tobytes() == data.tobytes()
    assert len(first) + len(last) == rows.edges_nbytes
    assert len(last) < rows.nbytes


def test_rows_are_those_of_the_tensor() -> None:
    assert cut(Content("float32", 64), 4096) == Rows(256, 0, 4096)
    assert cut(Content("float32", 75, 63), 4096) == Rows(300, 48, 4096)
    assert cut(Content("bfloat16", 3, 1), 4096) == Rows(66, 4, 4096), "eleven of 6 bytes"
    assert cut(Content("float32", 1), 4096) == Rows(64, 0, 4096), "no rows: pieces"
    assert cut(Content("float32", MAX_ROW_BYTES // 4), 4 << 20) == Rows(MAX_ROW_BYTES, 0, 4 << 20)
    long = MAX_ROW_BYTES // 4 + 25
    assert cut(Content("float32", long, 1), 4 << 20) == Rows(PIECE_BYTES, (long - 1) * 4 % PIECE_BYTES, 4 << 20)


@pytest.mark.parametrize(
    ("content", "nbytes"),
    [
        (Content("", 64), 4096),
        (Content("float32", 64), 255),
        (Content("float32", 64, 32), 300),
        (Content("int8", 1), 0),
    ],
)
def test_no_whole_row_is_nothing_to_cut(content: Content, nbytes: int) -> None:
    assert cut(content, nbytes) is None


def test_views_write_through() -> None:
    data = bytearray(300)
    rows = Rows(64, 10, 300)
    rows.table(memoryview(data))[1] = 7
    first, last = rows.edges(memoryview(data))
    first[:], last[:] = 1, 2
    assert data == b"\1" * 10 + b"\0" * 64 + b"\7" * 64 + b"\0" * 128 + b"\2" * 34


def test_every_dtype_that_is_saved_has_rows() -> None:
    for dtype in dtypes._DTYPES:
        rows = cut(Content(dtype, 1000), 1 << 20)
        assert rows is not None, dtype
        assert rows.nbytes == 1000 * dtypes.itemsize(dtype)
    assert cut(Content("int7", 1000), 1 << 20) is None
