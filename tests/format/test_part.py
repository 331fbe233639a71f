"""Tables and parts: what fits a layout, and nothing hostile believed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import xxhash
from helpers.documents import (
    FAILED_NAME,
    FIRST_DOCUMENT,
    FIRST_NAME,
    GENERATION,
    LAYOUT,
    NAME,
    OLD,
    PACKS,
    PART,
    PART_DOCUMENT,
    REUSING,
    REUSING_DOCUMENT,
    REUSING_NAME,
    SAVE,
    TABLE,
    decode_renamed,
)
from support import resealed

from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.box import Box
from ckptlib.format.check import Check
from ckptlib.format.documents import Fields
from ckptlib.format.keys import PackSet, PartName, SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.part import Part, PartHead
from ckptlib.format.table import Table, shard_nbytes


def test_a_table_fits_its_layout() -> None:
    TABLE.check(LAYOUT, "here")
    assert TABLE.first_chunks == (0, 2, 3)
    assert TABLE.nbytes_data == 82
    assert [shard_nbytes(e, b) for e, b in zip(LAYOUT.tensors, TABLE.boxes, strict=True)] == [64, 10, 8]


def test_a_table_of_a_layout_without_tensors() -> None:
    empty = Layout(1, ())
    Table(empty.digest, (), (), (), (), (), ()).check(empty, "here")
    with pytest.raises(FormatError, match="here: a shard names tensor 0 of 0"):
        Table(empty.digest, (0,), (Box((), ()),), (1,), (0,), (0,), (4,)).check(empty, "here")


@pytest.mark.parametrize("num_chunks", [(1, 0), (0, 1)])
def test_a_shard_without_elements_is_in_no_table(num_chunks: tuple[int, int]) -> None:
    """Nor may it share the chunk of others."""
    layout = Layout(1, (TensorEntry("w", "float32", (4, 4), ByHand()), TensorEntry("z", "float32", (0, 4), ByHand())))
    shards = (1, 0) if num_chunks[0] == 0 else (0, 1)
    boxes = tuple(Box.whole(layout.tensors[tensor].shape) for tensor in shards)
    table = Table(layout.digest, shards, boxes, (1, 0), (0,), (4096,), (64,))
    with pytest.raises(FormatError, match=r"here: z\[0:0, 0:4\] is a shard of no elements, expected one at least"):
        table.check(layout, "here")
    Table(layout.digest, (0,), (Box.whole((4, 4)),), (1,), (0,), (4096,), (64,)).check(layout, "here")


def test_a_part_with_digests_that_nobody_knows() -> None:
    name, document = replace(PART, algorithm="sha256").encode()
    with pytest.raises(FormatError, match=f"{name.key}.*digest algorithm 'sha256' is not one of xxh3, blake3"):
        Part.decode(name, document)
    name, document = replace(PART, algorithm="blake3").encode()
    assert Part.decode(name, document).algorithm == "blake3"


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
    columns = shared.columns(LAYOUT)
    assert [[*column] for column in columns[1:]] == [["float32", "bfloat16", "float64"], [64, 10, 8], [0, 0, 10]]
    assert {tensor: [*shards] for tensor, shards in columns.of_tensor.items()} == {0: [0], 1: [1], 2: [2]}
    assert shared.placed((0, 0, 0), (0, 48, 64)).columns(LAYOUT) is columns, "they do not tell where chunks lie"
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
        decode_renamed(resealed(FIRST_DOCUMENT, table=table), FIRST_NAME)
    if table["chunks"] == [] or table["chunks"]["nbytes"] != CHUNKS["nbytes"] or table["shards"] != SHARDS:
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
        {"packs": [[PACKS[0].key, True], [PACKS[1].key, 8192]]},
        {"packs": [[PACKS[0].key, 8192, 1.5, 0], [PACKS[1].key, 8192]]},
        {"uses": [str(OLD)]},
        {"places": {"runs": [[0, 4096, 2], [1, 4096, 1], [2, 4112, 1]]}},  # of two packs
        {"places": {"runs": [[0, 8129, 2], [1, 4096, 1], [1, 4112, 1]]}},  # ends beyond its pack
        {"places": {"runs": [[0, 4096, 1], [0, 2**62, 1], [1, 4096, 1], [1, 4112, 1]]}},
        {"packs": [[PACKS[0].key, 8192]]},
        {"packs": [PACKS[0].key, PACKS[1].key]},
        {"values": []},
        {"metrics": None},
    ],
)
def test_a_hostile_part_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        decode_renamed(resealed(PART_DOCUMENT, **fields))


def test_chunks_that_are_larger_together_than_their_pack_are_refused() -> None:
    """A few rows could have the same gigabytes read thousands of times; frames count as they are stored."""
    table = TABLE.placed((0, 0, 1, 1), (0, 0, 4096, 4112))
    table.check_packs([64, 8192], "here")
    table.check_packs([56, 8192], "here", (48, 8, 10, 8))
    with pytest.raises(FormatError, match="here: chunks of pack 0 are larger together than it is"):
        TABLE.placed((0,) * 4, (0,) * 4).check_packs([64], "here")
    with pytest.raises(FormatError, match="here: chunks of pack 0 are larger together than it is"):
        table.check_packs([63, 8192], "here")
    with pytest.raises(FormatError, match="here: chunks of pack 0 are larger together than it is"):
        table.check_packs([55, 8192], "here", (48, 8, 10, 8))


@pytest.mark.parametrize(("number", "offset"), [(4, 0), (3, 8192 - 11), (3, 2**62)])
def test_a_base_out_of_the_packs_is_refused(number: int, offset: int) -> None:
    bases = {**json.loads(REUSING_DOCUMENT)["body"]["bases"], "pack": [number, 1], "offset": [offset, 8184]}
    with pytest.raises(FormatError, match=f"base .* of pack {number} lies outside of it"):
        decode_renamed(resealed(REUSING_DOCUMENT, bases=bases), REUSING_NAME)


def test_a_part_under_the_name_of_another_is_refused() -> None:
    for name in (replace(NAME, digest="0" * 32), FAILED_NAME):
        with pytest.raises(CorruptData, match="does not match the digest in its name"):
            Part.decode(name, PART_DOCUMENT)
    others = {"rank": 0}, {"attempt": "0" * 8}, {"table": "0" * 32}, {"check": Check(1, 2, 3)}
    for other in (replace(NAME, **fields) for fields in others):  # type: ignore[arg-type]
        with pytest.raises(FormatError, match="different parts"):
            Part.decode(other, PART_DOCUMENT)


# -- what a part says of other saves


def test_a_part_says_which_packs_of_other_saves_it_needs() -> None:
    fresh, carried = PackSet(OLD), PackSet(OLD, carried=True)
    assert PART.uses == ()
    assert REUSING.uses == (fresh, carried)
    assert REUSING.nbytes_put == PART.nbytes_put == NAME.nbytes == 2 * 8192
    assert NAME.uses == xxhash.xxh3_128_hexdigest(b"")[:16]
    assert REUSING_NAME.uses == xxhash.xxh3_128_hexdigest(f"{OLD} {OLD}-carried".encode())[:16]
    assert json.loads(REUSING_DOCUMENT)["body"]["uses"] == [str(OLD), f"{OLD}-carried"]
    assert PartHead.decode(REUSING_NAME, REUSING_DOCUMENT).uses == REUSING.uses


def test_the_table_of_a_part_is_the_same_wherever_its_chunks_lie() -> None:
    """So the proof that a step is whole holds from one save to the next."""
    assert REUSING_NAME.table == NAME.table == xxhash.xxh3_128_hexdigest(TABLE.cuts.encode())
    assert replace(TABLE, nbytes=(32, 32, 10, 8)).cuts_digest != NAME.table


def test_chunks_are_as_large_as_their_packs_have_them() -> None:
    assert REUSING.stored == (48, 9, 5, 8)
    assert PART.stored == TABLE.nbytes
    assert Part.decode(REUSING_NAME, REUSING_DOCUMENT) == REUSING


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (replace(REUSING_NAME, uses="0" * 16), "different packs"),
        (replace(REUSING_NAME, uses=NAME.uses), "different packs"),
        (replace(REUSING_NAME, nbytes=0), "different packs"),
        (replace(REUSING_NAME, nbytes=2 * 8192 + 1), "different packs"),
        (replace(REUSING_NAME, nbytes=4 * 8192), "different packs"),
        (replace(REUSING_NAME, uses=None, nbytes=None), f"does not tell of chunks in packs of {OLD}"),
    ],
)
def test_a_name_that_lies_of_packs_is_refused(name: PartName, told: str) -> None:
    with pytest.raises(FormatError, match=told):
        Part.decode(name, REUSING_DOCUMENT)
    if name.uses is not None and name.uses != REUSING_NAME.uses:
        with pytest.raises(FormatError, match="different packs"):
            PartHead.decode(name, REUSING_DOCUMENT)


@pytest.mark.parametrize(
    "uses",
    [
        [],
        [str(OLD)],
        [f"{OLD}-carried", str(OLD)],  # not in order
        [str(OLD), str(OLD), f"{OLD}-carried"],
        [str(OLD), f"{OLD}-carried", str(SAVE)],
        [str(OLD), f"{OLD}-stolen"],
        [1],
        None,
    ],
)
def test_a_part_whose_uses_are_not_those_of_its_packs_is_refused(uses: object) -> None:
    """Also where the name agrees with them."""
    told = " ".join(map(str, uses)) if isinstance(uses, list) else ""
    agreeing = replace(REUSING_NAME, uses=xxhash.xxh3_128_hexdigest(told.encode())[:16])
    for name in (REUSING_NAME, agreeing):
        with pytest.raises(FormatError):
            decode_renamed(resealed(REUSING_DOCUMENT, uses=uses), name)


def test_a_part_of_version_1_is_read_as_it_was() -> None:
    part = Part.decode(FIRST_NAME, FIRST_DOCUMENT)
    assert part == PART
    assert (part.uses, part.codings, part.stored) == ((), {}, TABLE.nbytes)
    assert FIRST_NAME.table == xxhash.xxh3_128_hexdigest(TABLE.encoded.encode())
    packs = [[pack.key, pack.nbytes] for pack in REUSING.packs]
    with pytest.raises(FormatError, match="does not tell of chunks in packs of"):
        decode_renamed(resealed(FIRST_DOCUMENT, packs=packs), FIRST_NAME)


@pytest.mark.parametrize("when", [True, "1", None, [1], 10**400, -(2**63)])
def test_when_a_pack_was_made_is_a_time(when: object) -> None:
    with pytest.raises(FormatError, match="not a pack"):
        decode_renamed(resealed(PART_DOCUMENT, packs=[[PACKS[0].key, 8192, when], [PACKS[1].key, 8192, 1.5]]))
