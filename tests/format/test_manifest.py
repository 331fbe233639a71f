"""Roots, generations, parts, manifests: there and back, every damage found, and nothing hostile believed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from support import flips, of_version, resealed

from ckptlib.errors import CkptError, CorruptData, FormatError, NewerFormat
from ckptlib.format.box import Box
from ckptlib.format.documents import Fields, decode
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.manifest import Generation, Manifest, Root, TrashRecord, ranks_by_layout
from ckptlib.format.part import FailedPart, Pack, Part
from ckptlib.format.table import Table, shard_nbytes

GENERATION = GenerationId(7, "0123abcd")
SAVE = SaveId(500, GENERATION)
LAYOUT = Layout(
    2,
    (
        TensorEntry("a", "float32", (8, 4), ByHand()),
        TensorEntry("b", "bfloat16", (10,), ByHand()),
        TensorEntry("c", "float64", (), ByHand()),
    ),
)
TABLE = Table(
    layout=LAYOUT.digest,
    tensors=(0, 1, 2),
    boxes=(Box((2, 0), (4, 4)), Box((5,), (5,)), Box((), ())),
    num_chunks=(2, 1, 1),
    packs=(0, 0, 1, 1),
    offsets=(4096, 4144, 4096, 4112),
    nbytes=(48, 16, 10, 8),
)
PACKS = (Pack(SAVE.pack_key(1, "a77e3b70", 0), 8192), Pack(SAVE.pack_key(1, "a77e3b70", 1), 8192))
PART = Part(
    save=SAVE,
    rank=1,
    world_size=2,
    attempt="a77e3b70",
    table=TABLE,
    packs=PACKS,
    algorithm="xxh3",
    digests=tuple(digit * 32 for digit in "0123"),
    values={"sched": {"lr": 0.1, "$tuple": [1]}},
    metrics={"loss": 2.5},
    created=1.5,
)
NAME, PART_DOCUMENT = PART.encode()
FAILED_NAME, FAILED_DOCUMENT = FailedPart(SAVE, 1, "a77e3b70", "no space on /scratch").encode()
MANIFEST = Manifest(
    save=SAVE,
    world_size=3,
    parts=tuple(PartName(SAVE, rank, "a77e3b70", "1" * 32, "2" * 32) for rank in range(3)),
    layouts={"3" * 32: (0, 2), "4" * 32: (1,)},
    nbytes=12345,
    created=1.5,
    metrics={"loss": 2.5, "note": "fine"},
)
ROOT = Root("5" * 32, "xxh3", 1800.0)
INCARNATION = Generation(GENERATION, 3, SAVE, 1.5, {"python": "3.11"}, "node-1", {"run": "x"})
WITH_PEERS = replace(INCARNATION, domains=("a", "b", "c"), copies=1, kinds=(0, 1, 0))


def test_kinds_are_of_the_ranks_that_have_domains() -> None:
    for good in (WITH_PEERS, replace(WITH_PEERS, kinds=())):
        assert Generation.decode(good.encode(), "here") == good
    wrong = replace(WITH_PEERS, kinds=(0, 1))
    with pytest.raises(FormatError, match="kinds of 2 ranks, and domains of 3"):
        Generation.decode(wrong.encode(), "here")


def decode_renamed(data: bytes) -> Part:
    """A part whose name fits its bytes, whatever these say."""
    return Part.decode(replace(NAME, digest=xxhash.xxh3_128_hexdigest(data)), data)


DOCUMENTS: dict[str, tuple[object, bytes, Callable[[bytes], object]]] = {
    "root": (ROOT, ROOT.encode(), lambda data: Root.decode(data, "here")),
    "generation": (INCARNATION, INCARNATION.encode(), lambda data: Generation.decode(data, "here")),
    "part": (PART, PART_DOCUMENT, lambda data: Part.decode(NAME, data)),
    "part, renamed": (PART, PART_DOCUMENT, decode_renamed),
    "failed part": (
        FailedPart(SAVE, 1, "a77e3b70", "no space on /scratch"),
        FAILED_DOCUMENT,
        lambda data: FailedPart.decode(FAILED_NAME, data),
    ),
    "manifest": (MANIFEST, MANIFEST.encode(), lambda data: Manifest.decode(SAVE, data)),
}

kinds = pytest.mark.parametrize("kind", DOCUMENTS)


@kinds
def test_there_and_back(kind: str) -> None:
    value, document, read = DOCUMENTS[kind]
    assert read(document) == value


@kinds
def test_every_flipped_bit_is_found(kind: str) -> None:
    value, document, read = DOCUMENTS[kind]
    body_at = document.index(b'"body":') + 7
    named_by_digest = kind in ("part", "failed part")
    for position, data in flips(document):
        if position == document.index(b":") + 1 and data[position] != ord(",") and kind != "part, renamed":
            assert read(data) == value, "the digest says which version it is"
            continue
        with pytest.raises(CorruptData if named_by_digest or position >= body_at else (CorruptData, FormatError)):
            read(data)


@kinds
def test_every_truncation_is_found(kind: str) -> None:
    _, document, read = DOCUMENTS[kind]
    for length in range(len(document)):
        with pytest.raises((CorruptData, FormatError)):
            read(document[:length])


@pytest.mark.parametrize("kind", ["root", "generation", "part, renamed", "manifest"])
def test_unknown_fields_are_ignored_missing_ones_and_newer_versions_refused(kind: str) -> None:
    value, document, read = DOCUMENTS[kind]
    assert read(resealed(document, novelty={"a": 1})) == value
    for name in json.loads(document)["body"].keys() - {"step"}:  # that one is for people and jq
        with pytest.raises(FormatError, match=f"'{name}'"):
            read(resealed(document, **{name: ...}))
    with pytest.raises(NewerFormat):
        read(of_version(document, 2))


@kinds
def test_another_kind_of_document_is_refused(kind: str) -> None:
    _, document, read = DOCUMENTS[kind]
    for _, other, _ in DOCUMENTS.values():
        if other != document:
            with pytest.raises((CorruptData, FormatError)):
                read(other)


@kinds
@given(data=st.data())
def test_any_value_in_any_field_is_taken_or_refused(kind: str, data: st.DataObject) -> None:
    """Never another exception than one of ours, and never without an end."""
    _, document, read = DOCUMENTS[kind]
    name = data.draw(st.sampled_from(sorted(json.loads(document)["body"])))
    odd = st.sampled_from(
        [None, True, -1, 0, 2**63, 10**400, 1.5, -1e300, "", "../x", "\u0661", "f" * 32, "0" * 10_000, [], {}, [[]]]
    )
    value = data.draw(odd | st.lists(odd, max_size=3) | st.dictionaries(st.sampled_from(["../x", "0" * 32]), odd))
    with contextlib.suppress(CkptError):
        read(resealed(document, **{name: value}))


# -- root, generation, trash


def test_a_root_with_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(FormatError, match=r"'md5' is not one of xxh3, blake3; update ckptlib"):
        Root.decode(resealed(ROOT.encode(), algorithm="md5"), "here")
    for absurd in (2**53, 1e300, -1):
        with pytest.raises(FormatError, match="here: a save deadline of"):
            Root.decode(resealed(ROOT.encode(), save_deadline_s=absurd), "here")


def test_a_generation_that_began_anew_comes_back() -> None:
    anew = replace(INCARNATION, resumed_from=None, tags={})
    assert Generation.decode(anew.encode(), "here") == anew
    for hostile in ("../../etc", "", "000000000500-000007-0123abcd\n"):
        with pytest.raises(FormatError):
            Generation.decode(resealed(anew.encode(), resumed_from=hostile), "here")


def test_a_trash_record_says_what_it_was() -> None:
    fields = decode("trash", TrashRecord(SAVE, "dropped").encode(), "here")
    assert fields.text("save") == str(SAVE)
    assert fields.text("manifest") == SAVE.manifest_key
    assert fields.text("reason") == "dropped"


# -- tables and parts


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


# -- manifests


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_layouts_of_ranks_come_back(choice: list[int]) -> None:
    layouts = {f"{i}" * 32: tuple(r for r, c in enumerate(choice) if c == i) for i in range(4) if i in choice}
    parts = tuple(PartName(SAVE, rank, "a77e3b70", "1" * 32, "2" * 32) for rank in range(len(choice)))
    manifest = replace(MANIFEST, world_size=len(choice), parts=parts, layouts=layouts)
    assert Manifest.decode(SAVE, manifest.encode()) == manifest


def test_ranks_are_sorted_by_layout_in_one_pass() -> None:
    """Tuples that are made anew for each rank take half a minute for these."""
    began = time.process_time()
    found = ranks_by_layout(("ab"[rank % 1000 == 0], rank) for rank in range(200_000))
    assert time.process_time() - began < 5
    assert found == {
        "a": tuple(rank for rank in range(200_000) if rank % 1000),
        "b": tuple(range(0, 200_000, 1000)),
    }


def test_a_layout_of_all_ranks_takes_no_room() -> None:
    body = json.loads(replace(MANIFEST, layouts={"3" * 32: tuple(range(3))}).encode())["body"]
    assert body["layouts"] == {"3" * 32: [[0, 2]]}


KEYS = [part.key for part in MANIFEST.parts]


@pytest.mark.parametrize(
    "fields",
    [
        {"save": str(SaveId(501, GENERATION))},
        {"save": "../x"},
        {"world_size": 4},
        {"world_size": 2**40},
        {"world_size": 0, "parts": [], "layouts": {}},
        {"parts": KEYS[:2]},
        {"parts": [KEYS[0], KEYS[2], KEYS[1]]},
        {"parts": [KEYS[0], KEYS[0], KEYS[2]]},
        {"parts": [*KEYS[:2], "../x"]},
        {"parts": [*KEYS[:2], KEYS[2].replace("500", "501")]},
        {"parts": [*KEYS[:2], PartName(SAVE, 2, "a77e3b70", None, "2" * 32).key]},
        {"parts": [*KEYS[:2], 3]},
        {"layouts": {}},
        {"layouts": {"3" * 32: [[0, 1]]}},
        {"layouts": {"3" * 32: [[0, 2]], "4" * 32: [[1, 1]]}},
        {"layouts": {"3" * 32: [[0, 3]]}},
        {"layouts": {"3" * 32: [[2, 0]]}},
        {"layouts": {"3" * 32: [[0, 1], [1, 2]]}},
        {"layouts": {"3" * 32: [0, 1, 2]}},
        {"layouts": {"3" * 32: [[0, 2**62]]}},
        {"layouts": {"3" * 32: [[0, 999_999]] * 10_000}},
        {"layouts": {"../x": [[0, 2]]}},
        {"layouts": {"": [[0, 2]]}},
        {"nbytes": -1},
        {"created": "now"},
    ],
)
def test_a_hostile_manifest_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        Manifest.decode(SAVE, resealed(MANIFEST.encode(), **fields))


def test_a_manifest_under_another_name_is_refused() -> None:
    with pytest.raises(FormatError, match="different saves"):
        Manifest.decode(SaveId(501, GENERATION), MANIFEST.encode())


def test_a_generation_with_peers_comes_back() -> None:
    with_peers = replace(INCARNATION, domains=("rack 1", "rack 1", "rack 2"), copies=1)
    assert Generation.decode(with_peers.encode(), "here") == with_peers
    assert b"peers" not in INCARNATION.encode()
