"""Agreement of ranks on what they hold: threads stand for ranks, since the claim is about logic."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from helpers.alike_ranks import AlikeRanks
from helpers.calls import num_calls
from hypothesis import given, settings
from hypothesis import strategies as st
from rankthreads import run_ranks

from ckptlib import UnsupportedState
from ckptlib.format.box import Box
from ckptlib.format.layout import ByHand, Layout, Mesh, OwnPerRank, Placed, ranks_touching
from ckptlib.format.overlaps import Overlap
from ckptlib.format.sharding import Replicate, Shard
from ckptlib.ranks.group import Group, SoloGroup
from ckptlib.saving.agreement import Agreement, agree, encode_rows, read_rows, rows_of
from ckptlib.saving.assign import assign, writes
from ckptlib.state.leaf import Leaf, Plain

OWNER = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])


def plain(name: str, tensor: torch.Tensor, owned: bool = False) -> Leaf:
    whole = ((Box.whole(tuple(tensor.shape)), tensor),) if tensor.numel() else ()
    return Leaf(name, str(tensor.dtype)[6:], tuple(tensor.shape), Plain(), whole, OWNER if owned else None)


def placed(name: str, rank: int, ranks: tuple[int, ...], shape: tuple[int, ...] = (8,)) -> Leaf:
    held = Placed(Mesh((len(ranks),), ranks), (Shard(0),), None)
    size = shape[0] // len(ranks)
    box = Box((ranks.index(rank) * size,), (size,))
    return Leaf(name, "float32", shape, held, ((box, torch.full((size,), float(rank))),), None)


def agreed(size: int, leaves: Callable[[int], Sequence[Leaf]]) -> list[Agreement]:
    def on_rank(group: Group) -> Agreement:
        mine = leaves(group.rank)
        return agree(mine, rows_of(mine, group), group)

    return run_ranks(size, on_rank)


def over(*ranks: int) -> Placed:
    return Placed(Mesh((len(ranks),), ranks), (Replicate(),), None)


# -- plain tensors


def test_equal_bytes_are_replicas_on_the_ranks_that_have_them() -> None:
    def leaves(rank: int) -> list[Leaf]:
        found = [
            plain("all", torch.arange(5.0)),
            plain("nan", torch.tensor([float("nan")])),
            plain("empty", torch.ones(0)),
        ]
        return [*found, plain("odd", torch.ones(2))] if rank % 2 else found

    agreements = agreed(4, leaves)
    for rank, agreement in enumerate(agreements):
        expected = {"all": over(0, 1, 2, 3), "nan": over(0, 1, 2, 3), "empty": over(0, 1, 2, 3)}
        assert agreement.holdings == expected | ({"odd": over(1, 3)} if rank % 2 else {})
        assert agreement.holders == {}


@pytest.mark.parametrize(
    "make",
    [
        lambda rank: torch.full((3,), float(rank // 2)),
        lambda rank: torch.ones(3 + rank // 2),
        lambda rank: torch.ones(3, dtype=torch.float32 if rank < 2 else torch.float64),
        lambda rank: torch.tensor([0.0, -0.0][rank // 2]),
    ],
    ids=["values", "shapes", "dtypes", "sign of zero"],
)
def test_differing_tensors_are_every_ranks_own_and_one_warning_names_them(
    make: Callable[[int], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        agreements = agreed(4, lambda rank: [plain("bn.mean", make(rank)), plain("same", torch.ones(2))])
    assert all(a.holdings == {"bn.mean": OwnPerRank(), "same": over(0, 1, 2, 3)} for a in agreements)
    (record,) = caplog.records
    assert "bn.mean differs between ranks 0 and " in record.getMessage()


@pytest.mark.parametrize("difference", ["values", "shapes"])
def test_what_an_optimizer_owns_must_not_differ(difference: str) -> None:
    def leaves(rank: int) -> list[Leaf]:
        tensor = torch.full((3,), float(rank)) if difference == "values" else torch.ones(3 + rank)
        return [plain("w", tensor, owned=True)]

    with pytest.raises(UnsupportedState, match=r"w is .*stage-global ones in a pipeline.*DTensor or Sharded.*PerRank"):
        agreed(2, leaves)


def test_one_name_for_different_kinds_is_refused_on_all_ranks() -> None:
    def on_rank(group: Group) -> str:
        mine = [plain("w", torch.ones(8)) if group.rank == 1 else placed("w", group.rank, (0, 1, 2, 3))]
        with pytest.raises(UnsupportedState) as caught:
            agree(mine, rows_of(mine, group), group)
        return str(caught.value)

    messages = run_ranks(4, on_rank)
    assert len(set(messages)) == 1
    assert "w is not the same tensor on ranks [0, 1, 2, 3]" in messages[0]


# -- the others


def test_meshes_are_told_in_the_groups_ranks() -> None:
    def leaves(rank: int) -> list[Leaf]:
        return [placed("w", rank + 4, (4, 5))]

    def on_rank(group: Group) -> Agreement:
        mine = leaves(group.rank)
        return agree(mine, rows_of(mine, group), group)

    for agreement in run_ranks(2, on_rank, first_global_rank=4):
        holding = agreement.holdings["w"]
        assert isinstance(holding, Placed)
        assert holding.mesh == Mesh((2,), (0, 1))
    with pytest.raises(UnsupportedState, match=r"w: its mesh has rank\(s\) \[4, 5\].*process_group="):
        run_ranks(2, on_rank)


def test_what_ranks_say_alike_takes_memory_once() -> None:
    """Each description has all ranks of a mesh, and there may be thousands of ranks with thousands of tensors."""

    def on_rank(group: Group) -> Agreement:
        names = ["a", "b", *(["c"] if group.rank else [])]
        leaves = [placed(name, group.rank, (0, 1, 2, 3)) for name in names]
        rows = rows_of(leaves, group)
        told = [zlib.compress(encode_rows(some)) for some in (rows, {**rows, "d": rows["a"]})]
        read = read_rows([*told, told[0]])
        assert [ranks for _, ranks in read["a"]] == [(0, 2), (1,)]
        assert {id(row.how) for said in read.values() for row, _ in said} == {id(read["a"][0][0].how)}
        return agree(leaves, rows, group)

    for found in run_ranks(4, on_rank):
        assert {id(holding.mesh) for holding in found.holdings.values()} == {id(found.holdings["a"].mesh)}  # type: ignore[union-attr]


def test_what_thousands_of_ranks_say_alike_is_looked_at_once() -> None:
    group, ranks = AlikeRanks(), tuple(range(AlikeRanks.size))
    leaves = [placed(f"w{i}", 0, ranks, (2000,)) for i in range(50)]
    leaves += [plain(f"p{i}", torch.ones(2), owned=True) for i in range(50)]
    rows = rows_of(leaves, group)
    assert len(encode_rows(rows)) < 50_000, "the mesh of all ranks is told once"
    assert num_calls(lambda: agree(leaves, rows, group)) < 100 * len(leaves)
    assert agree(leaves, rows, group).holdings == {
        **{f"w{i}": leaves[0].held for i in range(50)},
        **{f"p{i}": over(*ranks) for i in range(50)},
    }


def test_a_mesh_of_which_some_do_not_hold_it_yet() -> None:
    """An expert that has seen no token has no optimizer state; the others must not wait for its rank."""
    held = over(0, 1)

    def leaves(rank: int) -> list[Leaf]:
        leaf = Leaf("o/w/exp_avg", "float32", (2,), held, ((Box.whole((2,)), torch.ones(2)),), None)
        return [leaf] if rank == 1 else []

    none, one = agreed(2, leaves)
    assert none == Agreement({}, {})
    assert one.holders == {"o/w/exp_avg": frozenset({1})}
    entries = assign(leaves(1), one.holdings, partial=one.holders)
    assert writes(entries[0], 1, one.holders["o/w/exp_avg"])
    assert [*ranks_touching(entries[0], Box.whole((2,)), frozenset({1}))] == [1]  # where a load looks for it


def test_per_rank_and_by_hand_need_no_agreement() -> None:
    def leaves(rank: int) -> list[Leaf]:
        own = Leaf("own", "float32", (rank,), OwnPerRank(), ((Box.whole((rank,)), torch.ones(rank)),), None)
        cut = Leaf("cut", "float32", (9,), ByHand(), ((Box((rank,), (1,)), torch.ones(1)),), None)
        return [own, cut]

    assert all(a.holdings == {"own": OwnPerRank(), "cut": ByHand()} for a in agreed(3, leaves))


# -- ties and overlaps


def tied(leaf: Leaf, name: str) -> Leaf:
    return replace(leaf, name=name, tied=leaf.name)


def test_what_all_ranks_tie_alike_is_one_tensor() -> None:
    """Where one of them lacks a name, that is another tensor: the other ranks' share of the first is not its."""

    def leaves(rank: int) -> list[Leaf]:
        first = plain("first", torch.full((2,), 0.0 if rank < 2 else 1.0))
        return [first, *([tied(first, "second")] if rank == 2 else []), tied(first, "third")]

    for rank, agreement in enumerate(agreed(3, leaves)):
        assert agreement.aliases == {"third": "first"}
        assert agreement.holdings == {"first": OwnPerRank()} | ({"second": over(2)} if rank == 2 else {})
        assert [entry.name for entry in assign(leaves(rank), agreement.holdings)] == [*agreement.holdings]


@pytest.mark.parametrize("equal", [True, False])
def test_what_some_ranks_tie_and_others_do_not_is_saved_under_each_of_its_names(equal: bool) -> None:
    def leaves(rank: int) -> list[Leaf]:
        last = plain("last", torch.ones(2))
        return [last, tied(last, "best") if rank == 0 else plain("best", torch.full((2,), 1.0 if equal else 9.0))]

    for agreement in agreed(2, leaves):
        assert agreement.aliases == {}
        assert agreement.holdings == {"last": over(0, 1), "best": over(0, 1) if equal else OwnPerRank()}


def test_a_tie_to_another_tensor_on_each_rank_is_none() -> None:
    def leaves(rank: int) -> list[Leaf]:
        first, second = plain("a", torch.ones(1)), plain("b", torch.ones(1))
        return [first, second, tied(first if rank else second, "c")]

    assert all(a.aliases == {} and a.holdings.keys() == {*"abc"} for a in agreed(2, leaves))


def cut(name: str, start: int, values: torch.Tensor, size: int = 6) -> Leaf:
    piece = (Box((start,), tuple(values.shape)), values)
    return Leaf(name, "float32", (size,), ByHand(), (piece,) if values.numel() else (), None)


def test_boxes_with_equal_halos_are_written_once() -> None:
    x = torch.arange(6.0)

    def leaves(rank: int) -> list[Leaf]:
        return [cut("x", 2 * rank, x[2 * rank : 2 * rank + 4]), cut("alone", rank, x[rank : rank + 1])]

    first, second = agreed(2, leaves)
    assert first.overlaps == second.overlaps == (Overlap("x", Box((2,), (2,)), (0, 1)),)
    assert first.written == {}
    assert second.written == {"x": (Box((4,), (2,)),)}


def test_ranks_that_hold_no_overlap_know_of_none() -> None:
    x = torch.arange(6.0)
    starts = [(0, 0), (0, 3), (0, 3), (3, 3)]  # nothing, twice the same, the rest

    def leaves(rank: int) -> list[Leaf]:
        start, size = starts[rank]
        return [cut("x", start, x[start : start + size])]

    agreements = agreed(4, leaves)
    overlap = Overlap("x", Box((0,), (3,)), (1, 2))
    assert [a.overlaps for a in agreements] == [(), (overlap,), (overlap,), ()]
    assert [a.written for a in agreements] == [{}, {}, {"x": ()}, {}]


def test_boxes_whose_halos_differ_are_refused_on_all_ranks() -> None:
    def on_rank(group: Group) -> str:
        x = torch.arange(6.0) + (group.rank == 1) * torch.eye(6)[3]
        mine = [cut("x", 2 * group.rank, x[2 * group.rank : 2 * group.rank + 2 + 2 * (group.rank < 2)])]
        with pytest.raises(UnsupportedState) as caught:
            agree(mine, rows_of(mine, group), group)
        return str(caught.value)

    (message,) = {*run_ranks(3, on_rank)}
    assert "ranks 0 and 1 both hold x[2:4], with different values" in message


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 15)), max_size=6))
def test_every_replica_is_written_once(size: int, names: list[tuple[str, int]]) -> None:
    """Whatever set of ranks has which name: one writer, and all layouts of a name agree about it."""
    who = {name: {r for r in range(size) if mask >> r & 1} for name, mask in names}

    def leaves(rank: int) -> list[Leaf]:
        return [plain(name, torch.full((3,), float(ord(name)))) for name in sorted(who) if rank in who[name]]

    writers: dict[str, list[int]] = {}
    for rank, agreement in enumerate(agreed(size, leaves)):
        layout = Layout(size, tuple(assign(leaves(rank), agreement.holdings)))
        for entry in layout.tensors:
            if writes(entry, rank, agreement.holders.get(entry.name)):
                writers.setdefault(entry.name, []).append(rank)
    assert writers.keys() == {name for name, ranks in who.items() if ranks}
    assert all(len(ranks) == 1 and ranks[0] in who[name] for name, ranks in writers.items())


class TwoRanks(SoloGroup):
    """To look at rows, which are made without a word to the others; alone, nobody needs digests."""

    size = 2


def test_digests_do_not_depend_on_strides() -> None:
    base = torch.randn(4, 6, dtype=torch.complex64)
    views = [base.t().contiguous(), base.t(), base.conj().t().conj(), base.t().clone()[:, :]]
    rows = [rows_of([plain("w", view)], TwoRanks())["w"] for view in views]
    assert all(row == rows[0] for row in rows)
    assert rows_of([plain("w", base.t().conj())], TwoRanks())["w"] != rows[0]


def test_one_rank_compares_nothing() -> None:
    leaves = [plain("w", torch.ones(4)), placed("d", 0, (0,))]
    assert rows_of(leaves, SoloGroup()) == {}
    assert agree(leaves, {}, SoloGroup()) == Agreement({"w": over(0), "d": leaves[1].held}, {})
