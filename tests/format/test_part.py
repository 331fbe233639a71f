"""Tables and parts: what fits a layout, and nothing hostile believed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import xxhash
from helpers.documents import (
    FAILED_NAME,
    GENERATION,
    LAYOUT,
    NAME,
    PACKS,
    PART_DOCUMENT,
    SAVE,
    TABLE,
    decode_renamed,
)
from support import resealed

from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.box import Box
from ckptlib.format.documents import Fields
from ckptlib.format.keys import SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.part import Part
from ckptlib.format.table import Table, shard_nbytes


def test_a_table_fits_its_layout() -> None:
    TABLE.check(LAYOUT, "here")
    assert TABLE.first_chunks == (0, 2, 3)
    assert TABLE.nbytes_data == 82
    assert [shard_nbytes(e, b) for e, b in zip(LAYOUT.tensors, TABLE.boxes, strict=True)] == [64, 10, 8]


def test_equal_boxes_of_several_dtypes_and_shapes_are_told_apart() -> None:
    kinds = [("float32", (4, 4)), ("float64", (4, 4)), ("float32", (2, 4)), ("float32", (4, 4))]
    layout = Layout(1, tuple(TensorEntry(f"t{i}", dtype, shape, ByHand()) for i, (dtype, shape) in enumerate(kinds)))
    box = Box((0, 0), (2, 4))
    table = Table(layout.digest, (0, 1, 2, 3), (box,) * 4, (1,) * 4, (0,) * 4, (0, 32, 96, 128), (32, 64, 32, 32))
    assert table.sizes(layout) == [32, 64, 32, 32]
    table.check(layout, "here")
    with pytest.raises(FormatError, match=r"here: t2\[1:3, 0:4\] lies outside of its tensor of shape \(2, 4\)"):
        replace(table, boxes=(Box((1, 0), (2, 4)),) * 4).check(layout, "here")
    with pytest.raises(FormatError, match=r"here: t1.* are 64 bytes, but the chunk holds 32"):
        replace(table, nbytes=(32, 32, 64, 32)).check(layout, "here")


def test_a_table_is_named_by_its_content_alone() -> None:
    again = Table.decode(Fields(json.loads(TABLE.encoded), "here"))
    assert again == TABLE
    assert again.digest == TABLE.digest == xxhash.xxh3_128_hexdigest(TABLE.encoded.encode())
    assert replace(TABLE, offsets=(4096, 4144, 4096, 4104)).digest != TABLE.digest


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "0" * 32},
        {"tensors": (0, 1, 3)},
        {"tensors": (0, 1, 2**40)},
        {"tensors": (1, 0, 2)},
        {"boxes": (Box((2, 0), (4, 4)), Box((6,), (5,)), Box((), ()))},
        {"boxes": (Box((2, 0), (4, 3)), Box((5,), (5,)), Box((), ()))},
        {"boxes": (Box((2,), (4, 4)), Box((5,), (5,)), Box((), ()))},
        {"boxes": (Box((2, 0, 0), (4, 4, 1)), Box((5,), (5,)), Box((), ()))},
        {"boxes": (Box((2, 0), (4, 4)), Box((5,), (5,)), Box((0,), (1,)))},
        {"num_chunks": (1, 2, 1)},
        {"nbytes": (47, 17, 10, 8)},  # the sum is right, but an element is torn
        {"nbytes": (48, 16, 12, 8)},
        {"nbytes": (48, 16, 10, 16)},
    ],
)
def test_a_table_that_contradicts_its_layout_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(FormatError, match="here: "):
        replace(TABLE, **changes).check(LAYOUT, "here")  # type: ignore[arg-type]


def test_shards_that_share_a_chunk_fill_it() -> None:
    """b and c lie in one chunk, c behind b; where, the sizes say."""
    shared = replace(TABLE, num_chunks=(2, 1, 0), packs=(0, 0, 1), offsets=(4096, 4144, 4096), nbytes=(48, 16, 18))
    again = Table.decode(Fields(json.loads(shared.encoded), "here"))
    again.check(LAYOUT, "here")
    assert again == shared
    assert shared.first_chunks == (0, 2, 2)
    assert [shared.is_shared(shard) for shard in range(3)] == [False, True, True]
    assert shared.begins(shared.sizes(LAYOUT)) == (4096, 4096, 4106)
    assert shared.describe(2, LAYOUT) == "b[5:10], c[]"
    assert shared.shards_in(0) == shared.shards_in(1) == [0]
    for nbytes in (10, 17, 19, 26):
        with pytest.raises(FormatError, match=r"here: b.* what shares its chunk are 18 bytes"):
            replace(shared, nbytes=(48, 16, nbytes)).check(LAYOUT, "here")


SHARDS, CHUNKS = json.loads(TABLE.encoded)["shards"], json.loads(TABLE.encoded)["chunks"]


@pytest.mark.parametrize(
    "columns",
    [
        {"layout": "../x"},
        {"shards": {**SHARDS, "tensor": [0, 1]}},
        {"shards": {**SHARDS, "tensor": [0, 1, -2]}},
        {"shards": {**SHARDS, "offset": SHARDS["offset"][:2]}},
        {"shards": {**SHARDS, "shape": [*SHARDS["shape"], []]}},
        {"shards": {**SHARDS, "shape": [[4, -4], [5], []]}},
        {"shards": {**SHARDS, "shape": [[2**40, 2**40], [5], []]}},
        {"shards": {**SHARDS, "chunks": [2, 0, 2]}},  # shares two chunks
        {"shards": {**SHARDS, "chunks": [0, 2, 2]}},  # shares with nobody
        {"shards": {**SHARDS, "chunks": [2, 2, -1]}},
        {"shards": {**SHARDS, "chunks": [2, 1, 2]}},
        {"shards": {**SHARDS, "chunks": [2, 1, 2**62]}},
        {"chunks": {**CHUNKS, "pack": [0, 0, 1]}},
        {"chunks": {**CHUNKS, "offset": [4096, 4144, 4096, -1]}},
        {"chunks": {**CHUNKS, "nbytes": [48, 16, 10, 0]}},
        {"chunks": {**CHUNKS, "nbytes": [48, 16, 10, 2**63]}},
        {"chunks": []},
    ],
)
def test_torn_columns_are_refused(columns: dict[str, object]) -> None:
    table = {**json.loads(TABLE.encoded), **columns}
    with pytest.raises(FormatError):
        Table.decode(Fields(table, "here"))
    with pytest.raises(FormatError):
        decode_renamed(resealed(PART_DOCUMENT, table=table))


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 2},
        {"rank": 10**6},
        {"save": str(SaveId(501, GENERATION))},
        {"attempt": "ffffffff"},
        {"attempt": "../../.."},
        {"world_size": 0},
        {"world_size": 10**7},
        {"digests": "0" * 127},
        {"digests": "0" * 160},
        {"digests": "F" * 128},
        {"packs": []},
        {"packs": [["../x", 8192], [PACKS[1].key, 8192]]},
        {"packs": [["/etc/passwd", 8192], [PACKS[1].key, 8192]]},
        {"packs": [[SAVE.manifest_key, 8192], [PACKS[1].key, 8192]]},
        {"packs": [[PACKS[0].key, 4159], [PACKS[1].key, 8192]]},
        {"packs": [[PACKS[0].key, -1], [PACKS[1].key, 8192]]},
        {"packs": [[PACKS[0].key, 8192]]},
        {"packs": [PACKS[0].key, PACKS[1].key]},
        {"values": []},
        {"metrics": None},
    ],
)
def test_a_hostile_part_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        decode_renamed(resealed(PART_DOCUMENT, **fields))


def test_a_part_under_the_name_of_another_is_refused() -> None:
    for name in (replace(NAME, digest="0" * 32), FAILED_NAME):
        with pytest.raises(CorruptData, match="does not match the digest in its name"):
            Part.decode(name, PART_DOCUMENT)
    for other in (replace(NAME, rank=0), replace(NAME, attempt="0" * 8), replace(NAME, table="0" * 32)):
        with pytest.raises(FormatError, match="different parts"):
            Part.decode(other, PART_DOCUMENT)
