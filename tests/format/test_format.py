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
from ckptlib.format.documents import Fields, encode
from ckptlib.format.keys import parse_save
from ckptlib.format.layout import decode_layout
from ckptlib.format.manifest import Generation, Manifest, Root, TrashRecord
from ckptlib.format.part import Part
from ckptlib.format.places import MAX_CODED_BYTES, Base, Coding, Places, decode_places

TEXT = (ROOT / "FORMAT.md").read_text()
BLOCKS = re.findall(r"```json\n(.*?)\n```", TEXT, re.S)
EXAMPLES = {json.loads(block)["kind"]: (block + "\n").encode() for block in BLOCKS}


def test_every_kind_is_shown() -> None:
    assert EXAMPLES.keys() == {"root", "generation", "manifest", "layout", "part", "trash"}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_digest_is_of_what_the_document_says(kind: str) -> None:
    body, version = EXAMPLES[kind].split(b'"body":', 1)[1][:-2], json.loads(EXAMPLES[kind])["ckptlib"]
    head = b'{"ckptlib":%d,"kind":"%s"' % (version, kind.encode())
    covered = body if version == 1 else head + body
    assert json.loads(EXAMPLES[kind])["digest"] == "xxh3:" + xxhash.xxh3_128_hexdigest(covered)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_versions_are_those_that_are_written(kind: str) -> None:
    assert json.loads(EXAMPLES[kind])["ckptlib"] == json.loads(encode(kind, {}))["ckptlib"]
    [sentence] = re.findall(r"^(.*) are written in version 2, all other documents in version 1\.$", TEXT, re.M)
    shown = "trash record" if kind == "trash" else kind
    assert (shown in sentence.lower()) == (json.loads(EXAMPLES[kind])["ckptlib"] == 2)


def test_documents_decode() -> None:
    assert Root.decode(EXAMPLES["root"], "FORMAT.md").algorithm == "xxh3"
    assert Generation.decode(EXAMPLES["generation"], "FORMAT.md").world_size == 2
    save = parse_save("000000000010-000002-d5828b0b")
    manifest = Manifest.decode(save, EXAMPLES["manifest"])
    assert [part.rank for part in manifest.parts] == [0, 1]
    layout = decode_layout(EXAMPLES["layout"], "FORMAT.md")
    assert layout.find(layout.aliases["model/embed.weight"]) == layout.tensors[2]
    [used] = manifest.uses
    trash = TrashRecord.decode(used.save, EXAMPLES["trash"], "FORMAT.md")
    assert (trash.uses, trash.created) == ({}, manifest.uses[used])


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
    table = body_layout.lay_out(layout, shards)
    assert table.cuts_digest == part.table.cuts_digest == manifest.parts[0].table
    before, now = pack(table, layout, 1 << 40), pack(table, layout, 1 << 40, (2,))
    assert [shape.nbytes for shape in (*before.packs, *now.packs)] == [p.nbytes for p in part.packs]
    assert part.table.packs == (0, 0, 1)
    assert part.table.offsets == (*before.table.offsets[:2], now.table.offsets[2])
    assert part.uses == (*manifest.uses,)
    assert sum(name.nbytes or 0 for name in manifest.parts) == manifest.nbytes


def test_the_table_of_a_part_is_named_by_its_text() -> None:
    data, manifest = EXAMPLES["part"], json.loads(EXAMPLES["manifest"])["body"]
    text = data[data.rindex(b'"table":') + len(b'"table":') : -len(b"}}\n")]
    assert json.loads(data)["body"]["table"] == json.loads(text)
    assert f"-ok-{xxhash.xxh3_128_hexdigest(text)}-" in manifest["parts"][0]


def test_the_name_of_a_part_tells_what_it_uses() -> None:
    manifest, part = (json.loads(EXAMPLES[kind])["body"] for kind in ("manifest", "part"))
    own = sum(nbytes for key, nbytes, _ in part["packs"] if key.startswith(f"packs/{part['save']}/"))
    uses = xxhash.xxh3_128_hexdigest(" ".join(part["uses"]).encode())[:16]
    assert manifest["parts"][0].endswith(f"-{uses}-{own:016x}.json")


def test_frames_and_bases_are_as_they_are_shown() -> None:
    [text] = re.findall(r'^    ("places":.*\n    "bases":.*)$', TEXT, re.M)
    fields = json.loads(f"{{{text}}}".replace("<32 hex>", "a" * 32))
    found = decode_places(Fields(fields, "FORMAT.md"), [266240, 259072, 5568])
    assert found == Places(
        (0, 0, 2),
        (4096, 270336, 8192),
        {
            1: Coding("patch", 5120, Base(1, 4096, 180224, "planes", "a" * 32)),
            2: Coding("planes", 4410),
        },
    )
    assert f"has at most {MAX_CODED_BYTES:,} bytes" in TEXT


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
