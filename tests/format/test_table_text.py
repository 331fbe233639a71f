"""A table told from its text is the one that any reader of JSON finds there, or none; and a slow proof agrees."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from itertools import product

import pytest
from support import resealed

from ckptlib.catalog.completeness import Proof
from ckptlib.errors import FormatError
from ckptlib.format import body_layout, part, table_text
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3
from ckptlib.format.documents import Fields
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.part import Pack, Part
from ckptlib.format.table import Table
from ckptlib.format.values import loads

SAVE = SaveId(1, GenerationId(1, "0" * 8))
SHAPES = ((), (1,), (6,), (4, 6), (2, 3, 4))
LAYOUT = Layout(
    3,
    tuple(
        TensorEntry(f"t{i:02}", dtype, shape, ByHand())
        for i, (shape, dtype) in enumerate(product(SHAPES, ("float32", "int8")))
    ),
)


def box_in(draw: random.Random, shape: tuple[int, ...]) -> Box:
    cuts = [sorted(draw.sample(range(n + 1), k=2)) for n in shape]
    return Box(tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts))


def table_of(draw: random.Random) -> Table:
    """Of any tensors, some of them in several shards."""
    entries = sorted(draw.choices(LAYOUT.tensors, k=draw.randrange(1, 16)), key=lambda entry: entry.name)
    return body_layout.lay_out(LAYOUT, [(entry.name, box_in(draw, entry.shape)) for entry in entries])


def by_json(text: bytes) -> Table | str:
    try:
        return Table.decode_cuts(Fields(loads(text), "table"))
    except FormatError as error:
        return str(error)


def fits(table: Table) -> str | None:
    """Whether a table fits, told shard by shard and byte by byte: None when it does."""
    sizes = {"float32": 4, "int8": 1}
    if table.layout != LAYOUT.digest:
        return "layout"
    if any(tensor >= len(LAYOUT.tensors) for tensor in table.tensors):
        return "no such tensor"
    shards, chunks, at = [], [], 0
    for tensor, box in zip(table.tensors, table.boxes, strict=True):
        entry = LAYOUT.tensors[tensor]
        if not len(box.offset) == len(box.shape) == len(entry.shape):
            return "dims"
        if any(a + n > m for a, n, m in zip(box.offset, box.shape, entry.shape, strict=True)):
            return "outside"
        size = sizes[entry.dtype]
        for n in box.shape:
            size *= n
        shards.append((size, sizes[entry.dtype]))
    for i, count in enumerate(table.num_chunks):
        if count:
            chunks.append([i])
        else:
            chunks[-1].append(i)
    for group in chunks:
        held = table.nbytes[at : at + table.num_chunks[group[0]]]
        at += len(held)
        if sum(held) != sum(shards[i][0] for i in group):
            return "bytes"
        if len(held) > 1 and any(nbytes % shards[group[0]][1] for nbytes in held):
            return "torn elements"
    return None


def is_checked(table: Table) -> bool:
    try:
        table.check(LAYOUT, "here")
    except FormatError:
        return False
    return True


@pytest.mark.parametrize("seed", range(20))
def test_a_table_is_what_json_says_and_is_checked_as_one_that_is_read_alone(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        first = table_of(draw)
        for _ in range(4):  # alike but for offsets, most of them outside of their tensors
            boxes = [Box(tuple(draw.randrange(4) for _ in box.shape), box.shape) for box in first.boxes]
            table = replace(first, boxes=tuple(boxes))
            text = table.cuts.encode()
            found = table_text.decode_cuts(text)
            expected = by_json(text)
            assert found is not None
            assert found == expected
            for made in (found, expected):
                assert isinstance(made, Table)
                again = made.placed(table.packs, table.offsets)
                assert is_checked(again) == is_checked(made) == (fits(table) is None)
            assert found.cuts_digest == table.cuts_digest
            assert found.first_chunks == table.first_chunks


@pytest.mark.parametrize("seed", range(20))
def test_no_text_is_taken_for_a_table_that_json_does_not_find_in_it(seed: int) -> None:
    """Damaged by single edits at random; those that look like a table are what JSON reads."""
    draw, taken = random.Random(seed), 0
    words = ("[", "]", ",", "],[", "[[", "]]", "0", "1", "9" * 25, "-1", "1.0", "true", "null", '"a"', '"offset":', " ")
    words = (*words, ',"shape":[[1]]', "{", "}", "\\", "NaN", "1e3", "00")
    for _ in range(300):
        text = table_of(draw).cuts
        for _ in range(draw.randrange(1, 3)):
            at, upto = draw.randrange(len(text)), draw.choice((0, 0, 1, 2, 8))
            text = text[:at] + draw.choice(words) + text[at + upto :]
        found = table_text.decode_cuts(text.encode())
        if found is not None:
            taken += 1
            expected = by_json(text.encode())
            assert found == expected
            assert isinstance(expected, Table)
            assert is_checked(found) == is_checked(expected) == (fits(expected) is None)
    assert taken < 300


def part_of(rank: int, table: Table) -> Part:
    packs = (Pack(SAVE.pack_key(rank, "0" * 8, 0), 1 << 20, 0.0),)
    values = {'"table":{}': [',"table":', '\\"table\\":']}
    digests = ("0" * 32,) * len(table.nbytes)
    return Part(SAVE, rank, 3, "0" * 8, table, packs, XXH3, digests, values, {}, 0.0)


def test_a_part_is_read_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    parts = [part_of(rank, table_of(draw)).encode() for rank in range(50)]
    found = [Part.decode(*encoded) for encoded in parts]
    monkeypatch.setattr(part.table_text, "decode_cuts", lambda text: None)
    assert found == [Part.decode(*encoded) for encoded in parts]


def test_the_last_table_of_a_body_is_a_field_of_it_only_where_json_says_so() -> None:
    """It may lie in a string, in an inner object, or stand beside another of that name."""
    text = body_layout.lay_out(LAYOUT, [("t04", Box((0,), (6,)))]).cuts
    bodies = {
        f'{{"places":{{}},"table":{text}}}': True,
        f'{{"places":{{}},"a":{{"b":1,"table":{text}}}': None,
        f'{{"places":{{}},"a":{{"b":1,"table":{text}}}}}': False,
        f'{{"places":{{}},"table":1,"table":{text}}}': None,
        f'{{"places":{{}},"a":[1,"table":{text}}}': None,
        f'{{"places":{{}},"a":"\\,"table":{text}}}': None,
        f'{{,"table":{text}}}': None,
        f'{{"table":{text}}}': False,
    }
    for body, expected in bodies.items():
        if expected is None:
            with pytest.raises(FormatError):
                part._decode_body(body.encode(), "here")
        else:
            fields, table = part._decode_body(body.encode(), "here")
            assert (table is not None) is expected
            assert ("table" in fields) is (not expected and body[2] == "t")
    name, document = part_of(0, table_of(random.Random(2))).encode()
    assert json.loads(resealed(document))["body"]["table"] == json.loads(Part.decode(name, document).table.cuts)


def slow_proof(tables: list[Table]) -> tuple[str | None, list[tuple[str, tuple[int, int]]]]:
    """Element by element: the first tensor of which one is missing, and who wrote one that another wrote, too."""
    owners: dict[str, dict[tuple[int, ...], list[tuple[int, int]]]] = {}
    for rank, table in enumerate(tables):
        for shard, (tensor, box) in enumerate(zip(table.tensors, table.boxes, strict=True)):
            held = owners.setdefault(LAYOUT.tensors[tensor].name, {})
            for at in product(*(range(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))):
                held.setdefault(at, []).append((rank, shard))
    lost, twice = None, set()
    for entry in LAYOUT.tensors:
        held = owners.get(entry.name, {})
        if lost is None and any(at not in held for at in product(*map(range, entry.shape))):
            lost = entry.name
        for writers in held.values():
            twice |= {(entry.name, (a[0], b[0])) for i, a in enumerate(writers) for b in writers[i + 1 :]}
    return lost, sorted(twice)


@pytest.mark.parametrize("seed", range(30))
def test_the_proof_of_columns_is_that_of_elements(seed: int) -> None:
    """Ranks with equal tensors and others in turns, holes, and elements that are written twice."""
    draw = random.Random(seed)
    whole = [(entry.name, Box.whole(entry.shape)) for entry in LAYOUT.tensors]
    tables = [body_layout.lay_out(LAYOUT, draw.sample(whole, draw.randrange(5, len(whole)))) for _ in range(2)]
    alike = table_of(draw)
    tables[1:1] = [alike, table_of(draw), alike, table_of(draw)]
    if seed % 2:
        tables.append(body_layout.lay_out(LAYOUT, whole))
    proof = Proof()
    for rank, table in enumerate(tables):
        proof.add(part_of(rank, table), LAYOUT)
    lost, twice = slow_proof(tables)
    missing = proof.missing()
    assert (missing is None) == (lost is None)
    if lost is not None:
        assert missing is not None
        assert missing.startswith(lost)
    doubts = proof.doubts()
    assert [d.ranks for d in doubts] == sorted(d.ranks for d in doubts)
    assert {(d.name, d.ranks) for d in doubts} <= {*twice}, "no doubt where none is"
    assert {name for name, _ in twice} == {d.name for d in doubts}


def test_very_many_shards_of_one_tensor_take_no_square_of_their_number() -> None:
    num = 20_000
    layout = Layout(2, (TensorEntry("a", "int8", (num,), ByHand()),))
    tables = [body_layout.lay_out(layout, [("a", Box((i,), (1,))) for i in range(half, num, 2)]) for half in (0, 1)]
    proof, began = Proof(), time.process_time()
    for rank, table in enumerate(tables):
        proof.add(part_of(rank, table), layout)
    proof._tell()
    assert time.process_time() - began < 2
