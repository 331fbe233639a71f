"""Where shards lie in a body: arrays of marks are the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import layout_of

from ckptlib.format import body_layout, dtypes
from ckptlib.format.body_layout import ALIGN_FROM_BYTES, SHARED_CHUNK_BYTES
from ckptlib.format.box import Box
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.table import Table
from ckptlib.pages import PAGE_BYTES, round_up

SAVE = SaveId(1, GenerationId(1, "0" * 8))


@st.composite
def tables(draw: st.DrawFn) -> tuple[Layout, list[tuple[str, Box]], Table, int]:
    names = ["bool", "bfloat16", "float32", "float64", "complex128"]
    chunk_bytes = draw(st.sampled_from([64, 4096, 100_000 - 100_000 % 16, 1 << 20]))
    small, large = st.integers(1, 500), st.sampled_from([2**14, 2**16 + 1, 2**18, 300_001])
    entries = [
        TensorEntry(f"t{i}", draw(st.sampled_from(names)), draw(st.tuples(small | large) | st.just(())), ByHand())
        for i in range(draw(st.integers(0, 6)))
    ]
    layout = Layout(1, tuple(entries))
    shards = draw(st.permutations([(e.name, Box.whole(e.shape)) for e in entries]))
    return layout, shards, body_layout.lay_out(layout, shards, chunk_bytes), chunk_bytes


@given(tables())
@settings(max_examples=60)
def test_lay_out(case: tuple[Layout, list[tuple[str, Box]], Table, int]) -> None:
    layout, shards, table, chunk_bytes = case
    table.check(layout, "here")
    assert sorted((layout.tensors[t].name, b) for t, b in zip(table.tensors, table.boxes, strict=True)) == sorted(
        shards, key=lambda s: s[0]
    )
    end = 0
    for c, (offset, nbytes) in enumerate(zip(table.offsets, table.nbytes, strict=True)):
        assert 0 < nbytes <= chunk_bytes
        assert 0 <= offset - end < PAGE_BYTES, "chunks overlap, or have a gap"
        end = offset + nbytes
        shared = [s for s in range(len(shards)) if c in table.chunks(s)]
        assert len(shared) == 1 or nbytes <= SHARED_CHUNK_BYTES
        assert [table.is_shared(s) for s in shared] == [len(shared) > 1] * len(shared)
    sizes = table.sizes(layout)
    behind = 0
    for shard, (begin, nbytes) in enumerate(zip(table.begins(sizes), sizes, strict=True)):
        entry, chunks = layout.tensors[table.tensors[shard]], table.chunks(shard)
        assert begin >= behind, "shards overlap"
        behind = begin + nbytes
        assert begin % dtypes.itemsize(entry.dtype) == 0
        if entry.nbytes_global >= ALIGN_FROM_BYTES:
            assert begin % PAGE_BYTES == 0
        assert table.offsets[chunks[0]] <= begin
        assert begin + nbytes <= table.offsets[chunks[-1]] + table.nbytes[chunks[-1]]
        for c in chunks[1:]:
            assert table.offsets[c] == table.offsets[c - 1] + table.nbytes[c - 1], "a shard is not contiguous"
    assert body_layout.body_nbytes(table) == -(-end // PAGE_BYTES) * PAGE_BYTES
    assert table == body_layout.lay_out(layout, list(reversed(shards)), chunk_bytes), "the order given does not matter"


def test_small_shards_lie_together_behind_the_large_ones() -> None:
    arrays = {
        "big": np.zeros(ALIGN_FROM_BYTES // 4, np.float32),
        "s1": np.zeros(3, np.int8),
        "s2": np.zeros(5, np.float64),
    }
    layout = layout_of(arrays)
    table = body_layout.lay_out(layout, [(name, Box.whole(a.shape)) for name, a in arrays.items()])
    assert [layout.tensors[t].name for t in table.tensors] == ["big", "s2", "s1"]
    assert (table.num_chunks, table.offsets, table.nbytes) == ((1, 1, 0), (0, ALIGN_FROM_BYTES), (ALIGN_FROM_BYTES, 43))
    assert table.begins(table.sizes(layout)) == (0, ALIGN_FROM_BYTES, ALIGN_FROM_BYTES + 40)
    assert body_layout.body_nbytes(table) == ALIGN_FROM_BYTES + PAGE_BYTES


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (512, [64] * 8),  # of 4 KiB: eighths
        (391, [98] * 3 + [97]),  # no part is smaller than 256 KiB
        (130, [65] * 2),
        (127, [127]),
        (16384, [1024] * 16),  # of 4 MiB
        (16385, [513] * 31 + [482]),  # nothing divides
    ],
)
def test_parts_of_a_shard(rows: int, expected: list[int]) -> None:
    layout = layout_of({"w": np.zeros((rows, 1024), np.float32)})
    table = body_layout.lay_out(layout, [("w", Box.whole((rows, 1024)))])
    assert [nbytes // PAGE_BYTES for nbytes in table.nbytes] == expected


def test_nothing_takes_no_room() -> None:
    layout = Layout(1, ())
    table = body_layout.lay_out(layout, [])
    assert (body_layout.body_nbytes(table), table.nbytes) == (0, ())
    assert round_up(0) == 0
    assert [round_up(n) for n in (1, PAGE_BYTES, PAGE_BYTES + 1)] == [
        PAGE_BYTES,
        PAGE_BYTES,
        2 * PAGE_BYTES,
    ]
