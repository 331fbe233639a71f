"""What codecs are told of a chunk is where its bytes lie in the tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import layout_of, shards_of

from ckptlib.format import body_layout
from ckptlib.format.table import Table
from ckptlib.writer.contents import TensorChunk, tensor_chunk


def contents(
    array: np.ndarray, chunk_bytes: int, world_size: int = 1, rank: int = 0
) -> tuple[Table, list[TensorChunk]]:
    layout = layout_of({"group/w": array}, world_size)
    table = body_layout.lay_out(layout, shards_of(layout, rank), chunk_bytes)
    found = [tensor_chunk(table, layout, chunk) for chunk in range(len(table.nbytes))]
    assert None not in found
    return table, [of for of in found if of is not None]


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.integers(1, 9),
    st.sampled_from(["float32", "int64", "uint8", "float16"]),
)
def test_each_chunk_begins_where_it_is_said_to(shape: list[int], chunk_elements: int, dtype: str) -> None:
    """An oracle that numbers elements: the first of a chunk is in the row's column that `first` says."""
    array = np.arange(math.prod(shape), dtype=dtype).reshape(shape)
    table, found = contents(array, chunk_elements * array.itemsize * 7)
    columns = np.arange(array.size) % (array.size // shape[0])
    element = 0
    for chunk, of in enumerate(found):
        assert (of.tensor, of.position, of.num) == ("group/w", chunk, len(found))
        assert of.content.dtype == dtype
        assert of.content.row == array.size // shape[0]
        assert of.content.first == columns[element]
        begins = (element + of.content.lead) % of.content.row
        assert begins == 0
        element += table.nbytes[chunk] // array.itemsize
    assert element == array.size


def test_a_shard_of_another_rank_begins_with_its_own_first_row() -> None:
    _, found = contents(np.zeros((30, 11), np.float32), 100, world_size=3, rank=2)
    assert (found[0].position, found[0].content.first) == (0, 0)
    assert found[0].num == len(found) > 1


def test_chunks_that_small_tensors_share_have_no_content() -> None:
    arrays = {"a": np.zeros(10, np.float32), "b": np.zeros(12, np.float32), "large": np.zeros((512, 512), np.float32)}
    layout = layout_of(arrays)
    table = body_layout.lay_out(layout, shards_of(layout, 0))
    found = [tensor_chunk(table, layout, chunk) for chunk in range(len(table.nbytes))]
    assert [of is None for of in found] == [False] * (len(found) - 1) + [True]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), ()])
def test_tensors_without_rows(shape: tuple[int, ...]) -> None:
    _, found = contents(np.zeros(shape, np.float32), 1 << 20)
    for of in found:
        assert of.content.first == 0
        assert of.content.lead == 0
