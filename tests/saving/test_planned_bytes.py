"""What is planned for a state is what earlier versions planned for it: the same layouts, tables and writers, byte by
byte. A job that goes on under another version refers to what the one before has written."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import xxhash
from torch import nn

from ckptlib.format import sharding
from ckptlib.format.body_layout import body_nbytes, lay_out
from ckptlib.format.box import Box
from ckptlib.format.layout import ByHand, Holding, Layout, Mesh, OwnPerRank, Placed, TensorEntry
from ckptlib.format.sharding import Replicate, Shard
from ckptlib.ranks.group import SoloGroup
from ckptlib.saving.assign import assign, holders_of, writes
from ckptlib.saving.planner import Planner
from ckptlib.state.flatten import flatten
from ckptlib.state.leaf import PerRank, Sharded

SIZE = 8
MESHES = (
    Mesh((8,), tuple(range(8))),
    Mesh((2, 4), (0, 2, 4, 6, 1, 3, 5, 7)),
    Mesh((2, 2, 2), tuple(reversed(range(8)))),
    Mesh((4,), (1, 3, 5, 7)),
)
DTYPES = ("bfloat16", "bool", "complex128", "float32", "float64", "int64")


def holdings(draw: random.Random) -> Holding:
    mesh = draw.choice(MESHES)
    chosen = tuple(draw.choice((Replicate(), Shard(0), Shard(1))) for _ in mesh.shape)
    return draw.choice((Placed(mesh, chosen, None), Placed(MESHES[0], (Replicate(),), None), OwnPerRank(), ByHand()))


def entries(draw: random.Random) -> list[TensorEntry]:
    names = [f"layers.{i}/w{'é' * (i % 3)}" for i in range(200)]
    shapes = [(0, 3), (1, 1), (5, 7), (64, 64), (300, 1000), (2048, 1024)]
    return [TensorEntry(n, draw.choice(DTYPES), draw.choice(shapes), holdings(draw)) for n in sorted(names)]


def boxes(layout: Layout, rank: int, partial: dict[str, frozenset[int]]) -> Iterator[tuple[str, Box]]:
    for entry in layout.tensors:
        if not writes(entry, rank, partial.get(entry.name)):
            continue
        if isinstance(entry.holding, Placed):
            mesh, placements = entry.holding.mesh, entry.holding.placements
            at = mesh.coordinate(rank)
            assert at is not None
            yield from ((entry.name, piece.box) for piece in sharding.pieces(entry.shape, mesh.shape, placements, at))
        elif 0 not in entry.shape:
            yield entry.name, Box.whole(entry.shape)


def planned(seed: int) -> str:
    """A digest of what eight ranks plan."""
    draw = random.Random(seed)
    found = entries(draw)
    partial = {e.name: frozenset(draw.sample(range(SIZE), 3)) for e in found if draw.random() < 0.1}
    assigned = assign(found, {e.name: e.holding for e in found}, partial)
    layout = Layout(SIZE, tuple(assigned), {"tied": found[0].name}, {"o": {"class": "Adam"}})
    told = [layout.encoded]
    for rank in range(SIZE):
        shards = [*boxes(layout, rank, partial)]
        draw.shuffle(shards)
        for chunk_bytes in (1 << 22, 4096):
            table = lay_out(layout, shards, chunk_bytes)
            told += [table.encoded.encode(), b"%d" % body_nbytes(table)]
        those = [holders_of(e.holding, rank) for e in layout.tensors if isinstance(e.holding, Placed)]
        told.append(repr(those).encode())
    return str(xxhash.xxh3_128_hexdigest(b"\n".join(told)))


@pytest.mark.parametrize(
    ("seed", "expected"),
    [
        (0, "681b0f602a0dbf1e4d4aa5118b7d1140"),
        (1, "f9fb073c0a1e4ad0ba05015627586ec3"),
        (2, "53490426d2f392de6f6938b2adcafc1c"),
    ],
)
def test_ranks_plan_what_they_planned_before(seed: int, expected: str) -> None:
    assert planned(seed) == expected


def state_of_one() -> dict[str, object]:
    """Modules with tied weights, optimizers with state, tensors of every kind beside them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(n, 32, bias=n % 2 == 0) for n in range(1, 60)), nn.Linear(600, 600))
    model.register_module("tied", nn.Linear(1, 32))
    model.tied.weight = model[0].weight
    model.register_buffer("count", torch.arange(5))
    model[3].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    loose = torch.arange(12.0)
    return {
        "a/b%": {f"{i}é": torch.full((i,), i, dtype=torch.bfloat16) for i in range(40)},
        "nested": [{"x": loose, "same": loose, "view": loose[2:5], "n": 3}, (torch.ones(()), "text")],
        "own": PerRank({"cache": torch.ones(3, 3), "empty": torch.ones(0)}),
        "cut": Sharded(torch.ones(2, 4), (2, 0), (4, 4)),
        "model": model,
        "optim": optimizer,
    }


def test_what_is_empty_has_no_shard() -> None:
    """FORMAT.md says so, and readers refuse one."""
    none = torch.ones(0, 4)
    state = {"none": none, "own": PerRank({"none": none}), "cut": Sharded(none, (2, 0), (4, 4)), "b": torch.ones(3)}
    flat, planner = flatten({**state, "within": torch.ones(2, 0, 2)}), Planner(SoloGroup())
    plan = planner.agree(flat, planner.rows(flat))
    assert [plan.layout.tensors[tensor].name for tensor in plan.table.tensors] == ["b"]
    assert [entry.name for entry in plan.layout.tensors] == ["b", "cut", "none", "own/none", "within"]
    plan.table.check(plan.layout, "here")


def test_one_rank_plans_what_it_planned_before() -> None:
    flat, planner = flatten(state_of_one()), Planner(SoloGroup())
    plan = planner.agree(flat, planner.rows(flat))
    table = plan.table
    order = [(flat.leaves[i].name, piece, region) for i, piece, region in plan.order]
    assert [name for name, _, _ in order] == [plan.layout.tensors[t].name for t in table.tensors]
    sources = planner.sources(flat.leaves, plan, lambda leaf: leaf.owner is not None)
    told = [
        plan.layout.encoded,
        table.encoded.encode(),
        repr([order, plan.body_nbytes, plan.shared, flat.aliases]).encode(),
        repr([(s.name, s.tensor.shape, s.tensor.dtype, s.overlap, s.lent) for s in sources]).encode(),
        repr([(f.name, f.dtype, f.shape, f.held, f.owner is None, f.tied, f.frozen) for f in flat.leaves]).encode(),
    ]
    assert str(xxhash.xxh3_128_hexdigest(b"\n".join(told))) == "8fd341b54541130f2d17fa82170bc423"


def test_what_changes_once_costs_no_comparison_before_later_saves() -> None:
    """Each waits for all ranks. Only a state that changes from save to save had better be compared before each."""
    planner, asks = Planner(SoloGroup()), []
    for size in (1, 1, 2, 2, 3, 4, 5, 5):
        flat = flatten({"x": torch.ones(size)})
        planner.agree(flat, planner.rows(flat))
        asks.append(planner.must_compare)
    assert asks == [False, False, False, False, False, True, True, False]
