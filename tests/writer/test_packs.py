"""Packs against safetensors itself: anybody can open them, and finds the tensors bit for bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.packs import Packed, data_of, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load
from support import SAVES_APART

from ckptlib.format import body_layout, dtypes
from ckptlib.format.body_layout import ALIGN_FROM_BYTES
from ckptlib.format.box import Box
from ckptlib.format.dtypes import _DTYPES
from ckptlib.format.keys import MAX_RANK, SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.table import Table
from ckptlib.pages import PAGE_BYTES
from ckptlib.writer.packs import Framed, Packer

SAVE, OTHER_SAVE = SAVES_APART
NEVER_CUT = 1 << 40
MAX_BLOCK_BYTES = 2 * ALIGN_FROM_BYTES


def laid_out(shapes: dict[str, tuple[str, tuple[int, ...]]], chunk_bytes: int = 4096) -> tuple[Layout, Table]:
    entries = [TensorEntry(name, dtype, shape, ByHand()) for name, (dtype, shape) in sorted(shapes.items())]
    layout = Layout(1, tuple(entries))
    return layout, body_layout.lay_out(layout, [(e.name, Box.whole(e.shape)) for e in entries], chunk_bytes)


def body_of(table: Table) -> bytes:
    """Noise where data lies, zeros between: NaNs of every kind are in it."""
    body = np.zeros(body_layout.body_nbytes(table), np.uint8)
    random = np.random.default_rng(0)
    for offset, nbytes in zip(table.offsets, table.nbytes, strict=True):
        body[offset : offset + nbytes] = random.integers(0, 256, nbytes)
    return body.tobytes()


def objects(packing: Packed, layout: Layout, body: bytes, save: SaveId = SAVE) -> list[bytes]:
    return [shape.head(save, 3, layout.digest) + data_of(shape, body) for shape in packing.packs]


def header_of(data: bytes) -> dict[str, dict[str, object]]:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])  # type: ignore[no-any-return]


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy())


def test_every_dtype_opens_bit_for_bit(tmp_path: Path) -> None:
    had = [dtype for dtype in _DTYPES if hasattr(torch, dtype)]
    shapes = {f"{dtype}/{ndim}": (dtype, (3, 5, 2)[:ndim]) for dtype in had for ndim in range(4)}
    layout, table = laid_out(shapes)
    body = body_of(table)
    [data] = objects(pack(table, layout, NEVER_CUT), layout, body)
    path = tmp_path / "pack.safetensors"
    path.write_bytes(data)
    with safe_open(path, framework="pt") as found:
        foreign = json.loads(found.metadata()["dtypes"])
        assert foreign == {f"{name}@0": dtype for name, (dtype, _) in shapes.items() if not dtypes.has_own_word(dtype)}
        for t, begin in zip(table.tensors, table.begins(table.sizes(layout)), strict=True):
            entry = layout.tensors[t]
            tensor = found.get_tensor(f"{entry.name}@0")
            expected = body[begin : begin + entry.nbytes_global]
            assert raw(tensor) == expected, entry
            if dtypes.has_own_word(entry.dtype):
                assert (str(tensor.dtype), tuple(tensor.shape)) == (f"torch.{entry.dtype}", entry.shape)
            else:
                back = tensor.view(getattr(torch, entry.dtype)).reshape(entry.shape)
                assert tensor.dtype == torch.uint8
                assert raw(back) == expected


def test_every_dtype_that_torch_has_is_known_with_its_size() -> None:
    had = {name: itemsize for name, (itemsize, _) in _DTYPES.items() if hasattr(torch, name)}
    assert {name: getattr(torch, name).itemsize for name in had} == had
    assert _DTYPES.keys() - had <= {"float8_e8m0fnu", "float4_e2m1fn_x2"}, "which came after torch 2.6"


@st.composite
def packings(draw: st.DrawFn) -> tuple[Layout, Table, Packed, int]:
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
    dims = st.integers(1, 40) | st.sampled_from([3000, 20_000, 2**16 + 1])
    shape = st.just(()) | st.tuples(dims) | st.tuples(st.integers(1, 9), st.sampled_from([1, 1000, 2**14]))
    shapes = draw(
        st.dictionaries(names, st.tuples(st.sampled_from(["bool", "bfloat16", "float64", "complex128"]), shape))
    )
    layout, table = laid_out(shapes, draw(st.sampled_from([4096, 40_960, 1 << 20])))
    pack_nbytes = draw(st.sampled_from([1, 20_000, 100_000, NEVER_CUT]))
    return layout, table, pack(table, layout, pack_nbytes), pack_nbytes


@given(packings())
@settings(max_examples=60)
def test_what_is_cut_is_whole(case: tuple[Layout, Table, Packed, int]) -> None:
    layout, table, packing, _ = case
    body = body_of(table)
    data = objects(packing, layout, body)
    assert b"".join(d[s.head_nbytes :] for d, s in zip(data, packing.packs, strict=True)) == body
    found = [load(d) for d in data]
    for d, shape in zip(data, packing.packs, strict=True):
        assert len(d) == shape.nbytes
        [piece] = shape.pieces
        assert shape.head_nbytes % PAGE_BYTES == piece.start % PAGE_BYTES == piece.stop % PAGE_BYTES == 0
    moved = packing.table
    assert (moved.tensors, moved.boxes, moved.num_chunks, moved.nbytes) == (
        table.tensors,
        table.boxes,
        table.num_chunks,
        table.nbytes,
    )
    for c in range(len(table.nbytes)):
        expected = body[table.offsets[c] : table.offsets[c] + table.nbytes[c]]
        assert data[moved.packs[c]][moved.offsets[c] : moved.offsets[c] + moved.nbytes[c]] == expected
    num_entries = 0
    for shard, begin in enumerate(table.begins(table.sizes(layout))):
        entry = layout.tensors[table.tensors[shard]]
        itemsize, done = dtypes.itemsize(entry.dtype), 0
        for c in table.chunks(shard):
            tensor = found[moved.packs[c]][f"{entry.name}@{done}"]
            assert raw(tensor) == body[begin + done * itemsize :][: tensor.nbytes]
            done += tensor.nbytes // itemsize
            num_entries += 1
        assert done == math.prod(entry.shape)
    num_slack = sum(name.startswith("@slack.") for pieces in found for name in pieces)
    assert sum(map(len, found)) - num_slack == num_entries


@given(packings())
@settings(max_examples=60)
def test_a_pack_is_only_too_large_where_one_chunk_or_block_is(case: tuple[Layout, Table, Packed, int]) -> None:
    _, table, packing, pack_nbytes = case
    for shape in packing.packs:
        [(start, stop)] = shape.pieces
        if stop - start > pack_nbytes + MAX_BLOCK_BYTES:
            assert sum(start <= offset < stop for offset in table.offsets) == 1


@given(packings(), st.data())
@settings(max_examples=60)
def test_some_chunks_are_whole_and_as_aligned_as_in_the_body(
    case: tuple[Layout, Table, Packed, int], data: st.DataObject
) -> None:
    """Any library opens the packs, and finds each shard that is in one chunk, and none of the chunks left out."""
    layout, table, _, pack_nbytes = case
    if not table.nbytes:
        return
    some = tuple(sorted(data.draw(st.sets(st.integers(0, len(table.nbytes) - 1), min_size=1))))
    body = body_of(table)
    packing = pack(table, layout, pack_nbytes, some)
    packs = objects(packing, layout, body)
    names = {name for found in map(load, packs) for name in found}
    for chunk in some:
        number, at = packing.table.packs[chunk], packing.table.offsets[chunk]
        nbytes, offset = table.nbytes[chunk], table.offsets[chunk]
        assert packs[number][at : at + nbytes] == body[offset : offset + nbytes]
        assert at % 64 == offset % 64
    for shard, tensor in enumerate(table.tensors):
        if table.num_chunks[shard] <= 1:
            assert (f"{layout.tensors[tensor].name}@0" in names) == (table.first_chunks[shard] in some)
    slack = sum(map(len, packs)) - sum(s.head_nbytes for s in packing.packs) - sum(table.nbytes[c] for c in some)
    assert slack <= PAGE_BYTES * len(some)


def test_frames_follow_one_another_and_tell_what_they_are_of() -> None:
    layout, table = laid_out({"a": ("float32", (400_000,)), "b": ("bfloat16", (300, 1000))}, chunk_bytes=1 << 20)
    frames = [Framed(chunk, f"codec-{chunk % 2}", 100 + chunk) for chunk in range(len(table.nbytes))]
    shape, offsets = Packer(table, layout, NEVER_CUT).pack_frames(frames)
    data = shape.head(SAVE, 3, layout.digest) + bytes(shape.data_nbytes)
    assert offsets == [len(data) - sum(f.nbytes for f in frames[i:]) for i in range(len(frames))]
    found, metadata = load(data), header_of(data)["__metadata__"]
    assert metadata["ckptlib"] == "2"
    codecs, boxes, words = (json.loads(str(metadata[what])) for what in ("codecs", "boxes", "dtypes"))
    assert {"a@0", "b@0"} <= found.keys() == codecs.keys()
    assert sorted(tensor.numel() for tensor in found.values()) == sorted(f.nbytes for f in frames)
    assert {*codecs.values()} == {"codec-0", "codec-1"}
    assert boxes["b@0"] == [[300, 1000], [0, 0], [300, 1000]]
    assert (words["a@0"], words["b@0"]) == ("float32", "bfloat16")


def test_many_small_shards_are_cut_too() -> None:
    layout, table = laid_out({f"t{i:04d}": ("int8", (1000 + i % 7,)) for i in range(9000)})
    packing = pack(table, layout, 1 << 20)
    sizes = [shape.data_nbytes for shape in packing.packs]
    assert len(sizes) > 5
    assert max(sizes) <= (1 << 20) + MAX_BLOCK_BYTES
    assert sum(sizes) < 1.016 * table.nbytes_data


def test_the_same_table_gives_the_same_heads_but_for_the_numbers_of_the_save() -> None:
    layout, table = laid_out({"a": ("float32", (70_000,)), "b": ("complex128", (3,))})
    one, two = pack(table, layout, 1), pack(table, layout, 1)
    assert one == two
    assert len(one.packs) > 1
    for shape in one.packs:
        heads = [
            shape.head(SAVE, 0, layout.digest),
            shape.head(OTHER_SAVE, MAX_RANK, "f" * 32),
        ]
        assert [len(head) for head in heads] == [shape.head_nbytes] * 2
        first, second = map(header_of, heads)
        assert first.pop("__metadata__") != second.pop("__metadata__")
        assert first == second


def test_the_metadata_says_whose_it_is() -> None:
    layout, table = laid_out({"a": ("float32", (5,))})
    [data] = objects(pack(table, layout, NEVER_CUT), layout, body_of(table))
    assert header_of(data)["__metadata__"] == {
        "ckptlib": "1",
        "save": str(SAVE),
        "rank": "000003",
        "layout": layout.digest,
    }


@pytest.mark.parametrize("num_pages", [1, 2])
def test_heads_that_end_near_a_page_are_valid(num_pages: int) -> None:
    """The name grows byte by byte, so that the header's end meets every place around the end of a page."""
    for length in range(num_pages * PAGE_BYTES - 330, num_pages * PAGE_BYTES - 230):
        layout, table = laid_out({"n" * length: ("float32", (4,))})
        packing = pack(table, layout, NEVER_CUT)
        [data] = objects(packing, layout, body_of(table))
        assert raw(load(data)["n" * length + "@0"]) == body_of(table)[:16]
        assert 8 + int.from_bytes(data[:8], "little") == packing.packs[0].head_nbytes


def test_entries_say_where_a_box_begins_in_the_whole_tensor() -> None:
    layout = Layout(1, (TensorEntry("a", "float32", (6, 8), ByHand()),))
    boxes = [Box((0, 0), (2, 8)), Box((2, 4), (4, 4)), Box((5, 0), (1, 3))]
    table = body_layout.lay_out(layout, [("a", box) for box in boxes], chunk_bytes=32)
    [data] = objects(pack(table, layout, NEVER_CUT), layout, body_of(table))
    index = np.arange(48).reshape(6, 8)
    expected = set()
    for box in boxes:
        inside = index[box.slices()].reshape(-1)
        expected |= {f"a@{inside[i]}" for i in range(0, len(inside), 8)}
    found = header_of(data)
    assert {name for name in found if name.startswith("a@")} == expected
    assert found["a@40"]["shape"] == [1, 3]
    assert found["a@20"]["shape"] == [8]


@st.composite
def cut_tensors(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], list[Box]]]:
    """Tensors, each cut twice at random into four boxes that are the whole, empty ones left out."""
    found = []
    for n in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        if draw(st.booleans()):
            shape = draw(st.sampled_from([(300, 400), (70_000,), (3, 90, 500), (1, 90_000)]))
        boxes = [Box.whole(shape)]
        for _ in range(2 if shape else 0):
            dim = draw(st.integers(0, len(shape) - 1))
            boxes = [half for box in boxes for half in halves(box, dim, draw(st.integers(0, box.shape[dim])))]
        dtype = draw(st.sampled_from(["bool", "float32", "complex128", "float8_e4m3fnuz", "bfloat16"]))
        found.append((f"t{n}@1", dtype, shape, [box for box in boxes if box.numel]))
    return found


def halves(box: Box, dim: int, at: int) -> list[Box]:
    def moved(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    near, far = moved(box.shape, at), moved(box.shape, box.shape[dim] - at)
    return [Box(box.offset, near), Box(moved(box.offset, box.offset[dim] + at), far)]


@given(cut_tensors())
@settings(max_examples=60)
def test_packs_alone_are_enough_to_make_the_tensors_again(
    case: list[tuple[str, str, tuple[int, ...], list[Box]]],
) -> None:
    layout = Layout(1, tuple(TensorEntry(name, dtype, shape, ByHand()) for name, dtype, shape, _ in case))
    shards = [(name, box) for name, _, _, boxes in case for box in boxes]
    table = body_layout.lay_out(layout, shards, chunk_bytes=1 << 15)
    body, wholes = bytearray(body_layout.body_nbytes(table)), {}
    for name, dtype, shape, _ in case:
        random = np.random.default_rng(len(wholes)).integers(0, 256, (*shape, dtypes.itemsize(dtype)), np.uint8)
        wholes[name] = random
    for t, box, begin in zip(table.tensors, table.boxes, table.begins(table.sizes(layout)), strict=True):
        data = wholes[layout.tensors[t].name][box.slices()].tobytes()
        body[begin : begin + len(data)] = data
    packs = objects(pack(table, layout, 100_000), layout, bytes(body))
    found = from_packs(packs)
    assert found.keys() == {name for name, _ in shards}
    for name, (dtype, whole) in found.items():
        [expected] = [entry.dtype for entry in layout.tensors if entry.name == name]
        assert dtypes.safetensors_name(dtype) == dtypes.safetensors_name(expected)
        assert dtype == expected or dtypes.has_own_word(expected)
        assert np.array_equal(whole, wholes[name])


def from_packs(packs: list[bytes]) -> dict[str, tuple[str, np.ndarray]]:
    """By tensor: its dtype, and its elements' bytes in the last dim. As FORMAT.md says, and nothing of ckptlib."""
    found: dict[str, tuple[str, list[tuple[tuple[int, ...], int, tuple[int, ...], tuple[int, ...], bytes]]]] = {}
    for data in packs:
        header, base = header_of(data), 8 + int.from_bytes(data[:8], "little")
        metadata = header.pop("__metadata__")
        foreign, boxes = (json.loads(metadata.get(name, "{}")) for name in ("dtypes", "boxes"))
        for key, entry in header.items():
            name, _, first = key.rpartition("@")
            if name:
                start, stop = entry["data_offsets"]
                shape, offset, box = boxes.get(key) or told(int(first), entry["shape"])
                rows = found.setdefault(name, (foreign.get(key, WORDS.get(entry["dtype"])), []))[1]
                rows.append((shape, int(first), offset, box, data[base + start : base + stop]))
    made = {}
    for name, (dtype, rows) in found.items():
        shape = tuple(map(max, zip(*(row[0] for row in rows), strict=True)))
        whole = np.zeros((*shape, dtypes.itemsize(dtype)), np.uint8)
        index = np.arange(math.prod(shape)).reshape(shape)
        for _, first, offset, box, data in rows:
            inside = index[tuple(slice(o, o + n) for o, n in zip(offset, box, strict=True))].reshape(-1)
            at = int(np.flatnonzero(inside == first)[0])
            elements = np.frombuffer(data, np.uint8).reshape(-1, dtypes.itemsize(dtype))
            whole.reshape(-1, dtypes.itemsize(dtype))[inside[at : at + len(elements)]] = elements
        made[name] = dtype, whole
    return made


WORDS = {word: name for name, (_, word) in _DTYPES.items() if dtypes.has_own_word(name)}


def told(first: int, shape: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Shape of the tensor, at least, and box of an entry that is whole rows of it."""
    if not shape:
        return [], [], []
    rows = first // math.prod(shape[1:])
    return [rows + shape[0], *shape[1:]], [rows, *(0 for _ in shape[1:])], shape


def test_metadata_stay_small() -> None:
    """Whole rows, as FSDP and replicas write them, need no box."""
    shapes = {f"model.layers.{i}.norm.weight": ("float32", (8, 4)) for i in range(1000)}
    layout, _ = laid_out(shapes)
    rows = body_layout.lay_out(layout, [(name, Box((4, 0), (4, 4))) for name in shapes])
    columns = body_layout.lay_out(layout, [(name, Box((0, 2), (8, 2))) for name in shapes])
    [by_rows], [by_columns] = (pack(table, layout, NEVER_CUT).packs for table in (rows, columns))
    assert "boxes" not in by_rows.told
    assert "boxes" in by_columns.told
    assert by_rows.head_nbytes < 110 * len(shapes)
    assert by_columns.head_nbytes < 180 * len(shapes)


def test_a_rank_that_writes_nothing_has_no_packs() -> None:
    layout, table = laid_out({})
    assert pack(table, layout, 1) == Packed((), table)
