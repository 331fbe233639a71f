"""Layouts: documents that do not grow with the ranks, and who may hold what."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import flips, of_version, resealed

from ckptlib.errors import CorruptData, FormatError, NewerFormat
from ckptlib.format import sharding
from ckptlib.format.box import Box
from ckptlib.format.documents import VERSION
from ckptlib.format.layout import ByHand, Layout, Mesh, OwnPerRank, Placed, TensorEntry, decode_layout, ranks_touching
from ckptlib.format.sharding import Placement, Replicate, Shard, StridedShard
from ckptlib.saving.assign import assign, writes

MESH = Mesh((2, 2), (0, 1, 2, 3))
LAYOUT = Layout(
    4,
    (
        TensorEntry("bias", "bfloat16", (8,), Placed(MESH, (Replicate(), Shard(0)), (1, 0))),
        TensorEntry("by/hand", "float32", (4, 4), ByHand()),
        TensorEntry("rng", "uint8", (16,), OwnPerRank()),
        TensorEntry("scalar", "float64", (), Placed(MESH, (Replicate(), Replicate()), None)),
        TensorEntry("weight\u00e9", "float8_e4m3fn", (8, 6), Placed(MESH, (StridedShard(0, 2), Shard(0)), (0, 0))),
    ),
    {"tied": "bias"},
    {"optim": {"kind": "adam", "nested": [1, 2.5, None]}},
)
DOCUMENT = LAYOUT.encoded


def decode(data: bytes) -> Layout:
    return decode_layout(data, "here")


def test_there_and_back() -> None:
    found = decode(DOCUMENT)
    assert found == LAYOUT
    assert found.encoded == DOCUMENT
    assert found.digest == LAYOUT.digest


@given(st.data())
def test_any_layout_comes_back(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    assert decode(layout.encoded) == layout
    assert decode(layout.encoded).encoded == layout.encoded


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    mesh = Mesh(mesh_shape, tuple(draw(st.permutations(range(math.prod(mesh_shape))))))
    entries = []
    for name in sorted(draw(st.sets(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), max_size=5))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        placements = tuple(draw(st.sampled_from([Replicate(), *map(Shard, range(len(shape)))])) for _ in mesh_shape)
        writer = draw(st.none() | st.tuples(*(st.integers(0, n - 1) for n in mesh_shape)))
        holding = draw(st.sampled_from([Placed(mesh, placements, writer), OwnPerRank(), ByHand()]))
        entries.append(TensorEntry(name, draw(st.sampled_from(["float32", "bool"])), shape, holding))
    return Layout(len(mesh.ranks), tuple(entries))


def test_a_layout_grows_with_tensors_and_not_with_ranks() -> None:
    def size(num_ranks: int) -> int:
        mesh = Mesh((num_ranks,), tuple(range(num_ranks)))
        entries = (
            TensorEntry(f"layer.{i:04d}", "float32", (4096,), Placed(mesh, (Shard(0),), None)) for i in range(99)
        )
        return len(Layout(num_ranks, tuple(entries)).encoded)

    assert size(1024) - size(8) < 5 * 1024  # the mesh's own list of ranks, once


def test_find_knows_aliases() -> None:
    assert LAYOUT.find("bias") == LAYOUT.tensors[0]
    assert LAYOUT.find("nobody") is LAYOUT.find("tied") is None, "an alias is not what it is saved under"
    assert LAYOUT.tensors[4].nbytes_global == 48
    assert LAYOUT.tensors[3].nbytes_global == 8


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), st.randoms())
def test_coordinates_and_ranks_are_inverse(shape: tuple[int, ...], random: object) -> None:
    ranks = list(range(10, 10 + math.prod(shape)))
    random.shuffle(ranks)  # type: ignore[attr-defined]
    mesh = Mesh(shape, tuple(ranks))
    coordinates = []
    for rank in mesh.ranks:
        at = mesh.coordinate(rank)
        assert at is not None
        assert mesh.rank(at) == rank
        coordinates.append(at)
    assert coordinates == sorted(set(coordinates))  # row-major
    assert mesh.coordinate(0) is None


# -- who may hold data


@st.composite
def placed_and_box(draw: st.DrawFn) -> tuple[TensorEntry, Box]:
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    choices: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
    placements = tuple(draw(st.sampled_from(choices)) for _ in mesh_shape)
    ranks = draw(st.permutations(range(math.prod(mesh_shape))))
    entry = TensorEntry("x", "float32", shape, Placed(Mesh(mesh_shape, tuple(ranks)), placements, None))
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return entry, Box(offset, tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, offset, strict=True)))


@given(placed_and_box(), st.randoms())
def test_ranks_touching_are_the_writers_of_the_box(case: tuple[TensorEntry, Box], random: object) -> None:
    entry, box = case
    [entry] = assign([entry], {entry.name: entry.holding})
    holding = entry.holding
    assert isinstance(holding, Placed)
    some = frozenset(rank for rank in holding.mesh.ranks if random.random() < 0.8)  # type: ignore[attr-defined]
    expected = set()
    for rank in some:
        at = holding.mesh.coordinate(rank)
        assert at is not None
        pieces = sharding.pieces(entry.shape, holding.mesh.shape, holding.placements, at)
        if writes(entry, rank) and any(piece.box.intersect(box) for piece in pieces):
            expected.add(rank)
    found = list(ranks_touching(entry, box, some))
    assert set(found) == expected
    assert len(found) == len(expected)


def test_where_the_layout_does_not_say_any_rank_may_hold_it() -> None:
    for entry in (LAYOUT.tensors[1], LAYOUT.tensors[2], LAYOUT.tensors[3]):
        assert list(ranks_touching(entry, Box.whole(entry.shape), frozenset({2, 0, 3}))) == [0, 2, 3]


# -- damage and malice


def test_every_flipped_bit_is_found() -> None:
    for position, data in flips(DOCUMENT):
        if position == DOCUMENT.index(b":") + 1:
            continue  # the digest says which version it is: see test_documents
        with pytest.raises((CorruptData, FormatError), match="here"):
            decode(data)


def test_every_truncation_is_found() -> None:
    for length in range(len(DOCUMENT)):
        with pytest.raises((CorruptData, FormatError), match="here"):
            decode(DOCUMENT[:length])


def test_unknown_fields_are_ignored_and_newer_versions_refused() -> None:
    assert decode(resealed(DOCUMENT, novelty=[1, 2])) == LAYOUT
    with pytest.raises(NewerFormat):
        decode(of_version(DOCUMENT, VERSION + 1))


BODY = json.loads(DOCUMENT)["body"]
ROW, MESH_0, PLACED_0 = BODY["tensors"][0], BODY["meshes"][0], BODY["holdings"][0]


def rows(*changed: object) -> dict[str, object]:
    return {"tensors": [*changed, *BODY["tensors"][1:]]}


def mesh(**fields: object) -> dict[str, object]:
    return {"meshes": [{**MESH_0, **fields}]}


def holding(**fields: object) -> dict[str, object]:
    return {"holdings": [{**PLACED_0, **fields}, *BODY["holdings"][1:]]}


@pytest.mark.parametrize(
    "fields",
    [
        {"world_size": 0},
        {"world_size": 10**7},
        {"world_size": 3},  # a mesh has rank 3
        {"world_size": "4"},
        {"tensors": ...},
        {"tensors": {}},
        {"aliases": []},
        {"objects": None},
        {"meshes": [3]},
        {"holdings": ["per-rank"]},
        {"meshes": []},
        {"holdings": []},
        rows(ROW[:3]),
        rows([1, *ROW[1:]]),
        rows([*ROW[:1], "float31", *ROW[2:]]),
        rows([*ROW[:2], [-1], 0]),
        rows([*ROW[:2], [True], 0]),
        rows([*ROW[:2], [8.0], 0]),
        rows([*ROW[:2], [2**61], 0]),
        rows([*ROW[:2], [2**31, 2**31], 0]),
        rows([*ROW[:2], [1] * 65, 0]),
        rows([*ROW[:2], "8", 0]),
        rows([*ROW[:3], -1]),
        rows([*ROW[:3], 99]),
        rows([*ROW[:3], "0"]),
        rows([*ROW[:2], [], 0]),  # S0 of a tensor without dims
        rows(ROW, ROW),
        rows(["zzz", *ROW[1:]]),
        mesh(shape=[2, 3]),
        mesh(shape=[0]),
        mesh(shape=[2**62, 2**62]),
        mesh(shape=[-2, -2]),
        mesh(ranks=[0, 1, 2, 2]),
        mesh(ranks=[0, 1, 2, 4]),
        mesh(ranks=[0, 1, 2, True]),
        holding(how="telepathy"),
        holding(how=None),
        holding(mesh=1),
        holding(mesh=-1),
        holding(placements=["R"]),
        holding(placements=["R", "S1"]),
        holding(placements=["R", "S-1"]),
        holding(placements=["R", "SS0x0"]),
        holding(placements=["R", "P"]),
        holding(placements=["R", 0]),
        holding(writer=[2, 0]),
        holding(writer=[-1, 0]),
        holding(writer=[1]),
        holding(writer="1,0"),
        {"aliases": {"tied": "nobody"}},
        {"aliases": {"tied": ["bias"]}},
        {"aliases": {"rng": "bias"}},
    ],
)
def test_nonsense_with_a_right_digest_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        decode(resealed(DOCUMENT, **fields))


def test_a_layout_with_fields_of_later_versions_has_the_name_that_it_was_put_under() -> None:
    later = resealed(DOCUMENT, later={"x": 1})
    found = decode(later)
    assert (found, found.encoded) == (LAYOUT, later)
    assert found.digest != LAYOUT.digest


def test_dtypes_and_shapes_change_the_digest() -> None:
    first, *rest = LAYOUT.tensors
    for changed in (replace(first, dtype="float16"), replace(first, shape=(16,)), replace(first, name="biaz")):
        assert replace(LAYOUT, tensors=(changed, *rest)).digest != LAYOUT.digest
