"""Which rank writes what: arrays of marks are the oracle."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.format import sharding
from ckptlib.format.box import Box
from ckptlib.format.layout import ByHand, Mesh, OwnPerRank, Placed, TensorEntry
from ckptlib.format.sharding import Placement, Replicate, Shard
from ckptlib.saving.assign import assign, writes


def mesh_of(*shape: int) -> Mesh:
    return Mesh(shape, tuple(range(math.prod(shape))))


def placed(name: str, shape: tuple[int, ...], mesh: Mesh, *placements: Placement) -> TensorEntry:
    return TensorEntry(name, "float32", shape, Placed(mesh, placements, None))


def with_writers(entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    entries = list(entries)
    return assign(entries, {entry.name: entry.holding for entry in entries})


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


@given(entries_on_meshes())
def test_every_element_is_written_exactly_once(entries: list[TensorEntry]) -> None:
    for entry in with_writers(entries):
        assert isinstance(entry.holding, Placed)
        written = np.zeros(entry.shape, dtype=int)
        for rank in entry.holding.mesh.ranks:
            if writes(entry, rank):
                for box in boxes_on(entry, rank):
                    written[box.slices()] += 1
        assert (written == 1).all()


@given(entries_on_meshes(), st.data())
def test_every_element_that_somebody_holds_is_written_exactly_once(
    entries: list[TensorEntry], data: st.DataObject
) -> None:
    for entry in with_writers(entries):
        assert isinstance(entry.holding, Placed)
        holders = data.draw(st.frozensets(st.sampled_from(entry.holding.mesh.ranks), min_size=1))
        written, held = np.zeros(entry.shape, dtype=int), np.zeros(entry.shape, dtype=bool)
        for rank in entry.holding.mesh.ranks:
            for box in boxes_on(entry, rank):
                written[box.slices()] += writes(entry, rank, holders)
                held[box.slices()] |= rank in holders
        assert np.array_equal(written, held)
        assert not any(writes(entry, r, holders) for r in entry.holding.mesh.ranks if r not in holders)


@given(entries_on_meshes(), st.randoms())
def test_assign_keeps_order_and_all_but_the_writer(entries: list[TensorEntry], random: object) -> None:
    assigned = with_writers(entries)
    for before, after in zip(entries, assigned, strict=True):
        assert isinstance(after.holding, Placed)
        assert replace(after, holding=replace(after.holding, writer=None)) == before
    shuffled = list(entries)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert {e.name: e for e in with_writers(shuffled)} == {e.name: e for e in assigned}


@given(entries_on_meshes(), st.data())
def test_assign_gives_the_same_answer_to_all_who_hold_the_same(entries: list[TensorEntry], data: st.DataObject) -> None:
    """A rank that holds nothing of some mesh and axes asks about fewer tensors."""

    def group(entry: TensorEntry) -> object:
        assert isinstance(entry.holding, Placed)
        return entry.holding.mesh, sharding.replica_axes(entry.holding.placements)

    everything = {entry.name: entry for entry in with_writers(entries)}
    known = data.draw(st.sets(st.sampled_from(sorted({str(group(e)) for e in entries}))))
    for entry in with_writers(entry for entry in entries if str(group(entry)) in known):
        assert everything[entry.name] == entry


def test_others_than_placed_tensors_are_left_alone() -> None:
    entries = [TensorEntry("a", "float32", (4,), OwnPerRank()), TensorEntry("b", "float32", (4,), ByHand())]
    assert with_writers(entries) == entries
    assert all(writes(entry, rank) for entry in entries for rank in range(3))


def test_who_is_not_in_the_mesh_writes_nothing() -> None:
    [entry] = with_writers([placed("a", (4,), Mesh((2,), (1, 3)), Replicate())])
    assert [writes(entry, rank) for rank in range(5)].count(True) == 1
    assert not any(writes(entry, rank, frozenset({0, 2})) for rank in range(5))
    assert [writes(entry, rank, frozenset({0, 3})) for rank in range(5)] == [
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
    assigned = with_writers(placed(f"t{i:03d}", (n,), mesh, *placements) for i, n in enumerate(sizes))
    load = Counter({r: sum(b.numel for e in assigned if writes(e, r) for b in boxes_on(e, r)) for r in mesh.ranks})
    assert max(load.values()) < 1.1 * sum(load.values()) / len(mesh.ranks)


def test_empty_and_tiny_tensors_are_spread_too() -> None:
    assigned = with_writers(placed(f"t{i}", (0,), mesh_of(4), Replicate()) for i in range(8))
    assert sorted(Counter(map(writer_of, assigned)).values()) == [2, 2, 2, 2]
