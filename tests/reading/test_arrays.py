"""Memory for what is read without torch."""

from __future__ import annotations

import math

import pytest

from ckptlib.errors import NoRoom
from ckptlib.pages import PAGE_BYTES
from ckptlib.reading.arrays import ALIGN_FROM_BYTES, empty


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "complex64", "complex128"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (7, 5), (1 << 20,), (2, 3, 1 << 19), (1 << 22, 1)])
def test_memory_is_of_the_shape_and_large_memory_begins_on_a_page(dtype: str, shape: tuple[int, ...]) -> None:
    array = empty("t", dtype, shape).array
    assert array.shape == shape
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    if array.nbytes >= ALIGN_FROM_BYTES:
        assert array.ctypes.data % PAGE_BYTES == 0
    data = empty("t", dtype, shape).data
    assert data.nbytes == math.prod(shape) * array.itemsize
    data[:] = b"\xff" * data.nbytes  # all of it is its own


@pytest.mark.parametrize("shape", [(1 << 46,), (1 << 62,), (1 << 40, 1 << 40)])
def test_what_has_no_room_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(NoRoom, match=r"layers\.0/w: no memory for float32"):
        empty("layers.0/w", "float32", shape)
