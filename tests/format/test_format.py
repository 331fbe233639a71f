"""FORMAT.md is read by the code it describes: every printed document has its real digest and decodes."""

from __future__ import annotations

import fnmatch
import itertools
import json
import re

import pytest
import xxhash
from helpers.packs import pack
from hypothesis import assume, given
from hypothesis import strategies as st
from places import ROOT

from ckptlib.errors import UnsupportedState
from ckptlib.format import body_layout, dtypes, sharding
from ckptlib.format.keys import parse_save
from ckptlib.format.layout import decode_layout
from ckptlib.format.manifest import Generation, Manifest, Root
from ckptlib.format.part import Part

TEXT = (ROOT / "FORMAT.md").read_text()
BLOCKS = re.findall(r"```json\n(.*?)\n```", TEXT, re.S)
EXAMPLES = {json.loads(block)["kind"]: (block + "\n").encode() for block in BLOCKS}


def test_every_kind_is_shown() -> None:
    assert EXAMPLES.keys() == {"root", "generation", "manifest", "layout", "part"}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_digest_is_of_the_body(kind: str) -> None:
    body = EXAMPLES[kind].split(b'"body":', 1)[1][:-2]
    assert json.loads(EXAMPLES[kind])["digest"] == "xxh3:" + xxhash.xxh3_128_hexdigest(body)


def test_documents_decode() -> None:
    assert Root.decode(EXAMPLES["root"], "FORMAT.md").algorithm == "xxh3"
    assert Generation.decode(EXAMPLES["generation"], "FORMAT.md").world_size == 2
    save = parse_save("000000000010-000002-d5828b0b")
    manifest = Manifest.decode(save, EXAMPLES["manifest"])
    assert [part.rank for part in manifest.parts] == [0, 1]
    layout = decode_layout(EXAMPLES["layout"], "FORMAT.md")
    assert layout.find(layout.aliases["model/embed.weight"]) == layout.tensors[2]


def test_the_documents_of_a_save_fit_together() -> None:
    manifest = Manifest.decode(parse_save("000000000010-000002-d5828b0b"), EXAMPLES["manifest"])
    layout = decode_layout(EXAMPLES["layout"], "FORMAT.md")
    assert xxhash.xxh3_128_hexdigest(EXAMPLES["layout"]) == layout.digest
    assert [*manifest.layouts] == [layout.digest]
    checks = [part.check for part in manifest.parts if part.check is not None]
    assert {check.number for check in checks} == {3}
    assert [sum(sums) % (2**40 - 87) for sums in zip(*((c.low, c.high) for c in checks), strict=True)] == [0, 0]
    assert all(check.low and check.high for check in checks)
    part = Part.decode(manifest.parts[0], EXAMPLES["part"])
    part.table.check(layout, "FORMAT.md")
    assert part.encode() == (manifest.parts[0], EXAMPLES["part"])
    shards = [
        (layout.tensors[t].name, box)
        for t, box in zip(reversed(part.table.tensors), reversed(part.table.boxes), strict=True)
    ]
    packing = pack(body_layout.lay_out(layout, shards), layout, 1 << 40)
    assert packing.table == part.table
    assert [shape.nbytes for shape in packing.packs] == [p.nbytes for p in part.packs]


def test_the_table_of_a_part_is_named_by_its_text() -> None:
    data, manifest = EXAMPLES["part"], json.loads(EXAMPLES["manifest"])["body"]
    text = data[data.rindex(b'"table":') + len(b'"table":') : -len(b"}}\n")]
    assert json.loads(data)["body"]["table"] == json.loads(text)
    assert f"-ok-{xxhash.xxh3_128_hexdigest(text)}-" in manifest["parts"][0]


def test_sizes_of_elements_are_those_of_the_table() -> None:
    [text] = re.findall(r"^Bytes per element: (.*?)\n\n", TEXT, re.S | re.M)
    found = {}
    for clause in re.findall(r"\d+ for [^;.]*", re.sub(r"\(.*?\)", "", text, flags=re.S)):
        size, names = clause.split(" for ")
        for name in re.findall(r"`(.*?)`", names):
            found |= dict.fromkeys(fnmatch.filter(dtypes._DTYPES, name), int(size))
    assert found == {name: dtypes.itemsize(name) for name in dtypes._DTYPES}


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[str]]:
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    words = st.just("R") | dims.map("S{}".format) | st.builds("SS{}x{}".format, dims, st.integers(1, 5))
    return shape, mesh, [draw(words) for _ in mesh]


@given(placed())
def test_boxes_are_those_of_the_document(case: tuple[tuple[int, ...], tuple[int, ...], list[str]]) -> None:
    shape, mesh, words = case
    for coordinate in itertools.product(*map(range, mesh)):
        try:
            found = sharding.pieces(shape, mesh, [sharding.decode(word) for word in words], coordinate)
        except UnsupportedState:
            assume(False)
        assert {(piece.box.offset, piece.box.shape) for piece in found} == boxes_by_document(
            shape, mesh, words, coordinate
        )


def boxes_by_document(
    shape: tuple[int, ...], mesh: tuple[int, ...], words: list[str], coordinate: tuple[int, ...]
) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """As the text under Layouts tells it."""

    def cut(indices: list[int], n: int) -> list[list[int]]:
        each = -(-len(indices) // n)
        return [indices[i * each : (i + 1) * each] for i in range(n)]

    lists = [list(range(size)) for size in shape]
    for n, c, word in zip(mesh, coordinate, words, strict=True):
        if n > 1 and word != "R":
            dim, _, factor = word.lstrip("S").partition("x")
            pieces = cut(lists[int(dim)], int(factor or 1))
            lists[int(dim)] = [index for piece in pieces for index in cut(piece, n)[c]]
    runs = []
    for indices in lists:
        starts = [i for i, index in enumerate(indices) if i == 0 or indices[i - 1] != index - 1]
        stops = [*starts[1:], len(indices)] if starts else []
        runs.append([(indices[a], b - a) for a, b in zip(starts, stops, strict=True)])
    return {(tuple(o for o, _ in box), tuple(n for _, n in box)) for box in itertools.product(*runs)}


def test_the_names_in_the_document_are_the_code_s() -> None:
    from ckptlib.format import keys

    for prefix in (keys.GENERATIONS, keys.LAYOUTS, keys.STEPS, keys.PARTS, keys.PACKS, keys.TRASH):
        assert f"\n    {prefix}" in TEXT
