"""Who writes what, and where it lies: arrays of marks are the oracle."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import layout_of

from ckptlib.format import body_layout, dtypes, sharding
from ckptlib.format.body_layout import ALIGN_FROM_BYTES, SHARED_CHUNK_BYTES
from ckptlib.format.box import Box
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import ByHand, Layout, Mesh, PerRank, Placed, TensorEntry
from ckptlib.format.sharding import Placement, Replicate, Shard
from ckptlib.format.table import Table
from ckptlib.pages import PAGE_BYTES, round_up

SAVE = SaveId(1, GenerationId(1, "0" * 8))


def mesh_of(*shape: int) -> Mesh:
    return Mesh(shape, tuple(range(math.prod(shape))))


def placed(name: str, shape: tuple[int, ...], mesh: Mesh, *placements: Placement) -> TensorEntry:
    return TensorEntry(name, "float32", shape, Placed(mesh, placements, None))


def writer_of(entry: TensorEntry) -> tuple[int, ...] | None:
    assert isinstance(entry.holding, Placed)
    return entry.holding.writer


@st.composite
def entries_on_meshes(draw: st.DrawFn) -> list[TensorEntry]:
    """Tensors on one or two meshes of up to three axes over the same ranks, in any order of ranks."""
    num = draw(st.sampled_from([1, 2, 4, 6, 8]))
    shapes = [s for n in (1, 2, 3) for s in itertools.product(range(1, num + 1), repeat=n) if math.prod(s) == num]
    meshes = [Mesh(draw(st.sampled_from(shapes)), tuple(draw(st.permutations(range(num))))) for _ in range(2)]
    entries = []
    for i in range(draw(st.integers(1, 6))):
        mesh = draw(st.sampled_from(meshes))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        choices: list[Placement] = [Replicate(), *map(Shard, range(len(shape)))]
        entries.append(placed(f"t{i}", shape, mesh, *(draw(st.sampled_from(choices)) for _ in mesh.shape)))
    return entries


def boxes_on(entry: TensorEntry, rank: int) -> list[Box]:
    assert isinstance(entry.holding, Placed)
    at = entry.holding.mesh.coordinate(rank)
    assert at is not None
    pieces = sharding.pieces(entry.shape, entry.holding.mesh.shape, entry.holding.placements, at)
    return [piece.box for piece in pieces]


# -- assign, writes


@given(entries_on_meshes())
def test_every_element_is_written_exactly_once(entries: list[TensorEntry]) -> None:
    for entry in body_layout.assign(entries):
        assert isinstance(entry.holding, Placed)
        written = np.zeros(entry.shape, dtype=int)
        for rank in entry.holding.mesh.ranks:
            if body_layout.writes(entry, rank):
                for box in boxes_on(entry, rank):
                    written[box.slices()] += 1
        assert (written == 1).all()


@given(entries_on_meshes(), st.data())
def test_every_element_that_somebody_holds_is_written_exactly_once(
    entries: list[TensorEntry], data: st.DataObject
) -> None:
    for entry in body_layout.assign(entries):
        assert isinstance(entry.holding, Placed)
        holders = data.draw(st.frozensets(st.sampled_from(entry.holding.mesh.ranks), min_size=1))
        written, held = np.zeros(entry.shape, dtype=int), np.zeros(entry.shape, dtype=bool)
        for rank in entry.holding.mesh.ranks:
            for box in boxes_on(entry, rank):
                written[box.slices()] += body_layout.writes(entry, rank, holders)
                held[box.slices()] |= rank in holders
        assert np.array_equal(written, held)
        assert not any(body_layout.writes(entry, r, holders) for r in entry.holding.mesh.ranks if r not in holders)


@given(entries_on_meshes(), st.randoms())
def test_assign_keeps_order_and_all_but_the_writer(entries: list[TensorEntry], random: object) -> None:
    assigned = body_layout.assign(entries)
    for before, after in zip(entries, assigned, strict=True):
        assert isinstance(after.holding, Placed)
        assert replace(after, holding=replace(after.holding, writer=None)) == before
    shuffled = list(entries)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert {e.name: e for e in body_layout.assign(shuffled)} == {e.name: e for e in assigned}


@given(entries_on_meshes(), st.data())
def test_assign_gives_the_same_answer_to_all_who_hold_the_same(entries: list[TensorEntry], data: st.DataObject) -> None:
    """A rank that holds nothing of some mesh and axes asks about fewer tensors."""

    def group(entry: TensorEntry) -> object:
        assert isinstance(entry.holding, Placed)
        return entry.holding.mesh, sharding.replica_axes(entry.holding.placements)

    everything = {entry.name: entry for entry in body_layout.assign(entries)}
    known = data.draw(st.sets(st.sampled_from(sorted({str(group(e)) for e in entries}))))
    for entry in body_layout.assign(entry for entry in entries if str(group(entry)) in known):
        assert everything[entry.name] == entry


def test_others_than_placed_tensors_are_left_alone() -> None:
    entries = [TensorEntry("a", "float32", (4,), PerRank()), TensorEntry("b", "float32", (4,), ByHand())]
    assert body_layout.assign(entries) == entries
    assert all(body_layout.writes(entry, rank) for entry in entries for rank in range(3))


def test_who_is_not_in_the_mesh_writes_nothing() -> None:
    [entry] = body_layout.assign([placed("a", (4,), Mesh((2,), (1, 3)), Replicate())])
    assert [body_layout.writes(entry, rank) for rank in range(5)].count(True) == 1
    assert not any(body_layout.writes(entry, rank, frozenset({0, 2})) for rank in range(5))
    assert [body_layout.writes(entry, rank, frozenset({0, 3})) for rank in range(5)] == [
        False,
        False,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [(mesh_of(8), (Replicate(),)), (mesh_of(2, 8), (Replicate(), Shard(0))), (mesh_of(4, 2), (Replicate(),) * 2)],
)
def test_many_tensors_are_balanced(mesh: Mesh, placements: tuple[Placement, ...]) -> None:
    """Of every size from a bias to an embedding: within 10 % of the mean on the rank that writes most."""
    random = np.random.default_rng(0)
    sizes = [8 * int(2**x) for x in random.uniform(3, 14, 300)]
    assigned = body_layout.assign(placed(f"t{i:03d}", (n,), mesh, *placements) for i, n in enumerate(sizes))
    load = Counter(
        {r: sum(b.numel for e in assigned if body_layout.writes(e, r) for b in boxes_on(e, r)) for r in mesh.ranks}
    )
    assert max(load.values()) < 1.1 * sum(load.values()) / len(mesh.ranks)


def test_empty_and_tiny_tensors_are_spread_too() -> None:
    assigned = body_layout.assign(placed(f"t{i}", (0,), mesh_of(4), Replicate()) for i in range(8))
    assert sorted(Counter(map(writer_of, assigned)).values()) == [2, 2, 2, 2]


# -- lay_out


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
