"""Overlaps of boxes, against sets of elements."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.errors import UnsupportedState
from ckptlib.format.box import Box
from ckptlib.format.overlaps import MAX_PIECES, Overlap, overlapping, overlaps, remainder


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))))


@st.composite
def cuts(draw: st.DrawFn) -> dict[int, Box]:
    """By rank: a box that is not empty."""
    shape = draw(st.lists(st.integers(1, 5), max_size=3))
    ranks = draw(st.sets(st.integers(0, 9), min_size=1, max_size=6))
    starts = {rank: tuple(draw(st.integers(0, size - 1)) for size in shape) for rank in ranks}
    return {
        rank: Box(start, tuple(draw(st.integers(1, size - a)) for size, a in zip(shape, start, strict=True)))
        for rank, start in starts.items()
    }


@settings(max_examples=300, deadline=None)
@given(cuts())
def test_what_two_ranks_hold_is_one_overlap_and_is_written_by_the_lowest(boxes: dict[int, Box]) -> None:
    found = overlaps({"x": boxes})
    for a, b in itertools.combinations(sorted(boxes), 2):
        both = elements(boxes[a]) & elements(boxes[b])
        assert [elements(o.box) for o in found if {a, b} <= {*o.ranks} and elements(o.box) == both] == [both] * bool(
            both
        )
    for overlap in found:
        assert len(overlap.ranks) > 1
        assert all(elements(overlap.box) <= elements(boxes[rank]) for rank in overlap.ranks)
    written: set[tuple[int, ...]] = set()
    for rank in sorted(boxes):
        left = remainder(boxes[rank], [o.box for o in found if rank in o.ranks and o.ranks[0] < rank])
        pieces = [e for piece in left for e in elements(piece)]
        assert len(pieces) == len({*pieces})
        assert {*pieces} == elements(boxes[rank]) - written
        written |= elements(boxes[rank])


def test_holders_of_equal_boxes_are_one_overlap_and_the_order_does_not_depend_on_who_asks() -> None:
    low, high = Box((0,), (4,)), Box((2,), (4,))
    boxes = {"b": {0: low, 1: low, 2: high}, "a": {2: high, 0: low}}
    expected = (
        Overlap("a", Box((2,), (2,)), (0, 2)),
        Overlap("b", low, (0, 1)),
        Overlap("b", Box((2,), (2,)), (0, 1, 2)),
    )
    assert overlaps(boxes) == expected
    assert overlaps(dict(reversed(boxes.items()))) == expected


def grid(size: int, width: int = 8) -> dict[int, Box]:
    """Cubes with halos of one element."""
    found = {}
    for rank, at in enumerate(itertools.product(range(size), repeat=3)):
        low, high = [max(i * width - 1, 0) for i in at], [min((i + 1) * width + 1, size * width) for i in at]
        found[rank] = Box(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))
    return found


def test_a_grid_with_halos_is_cut_into_one_box_for_each_rank() -> None:
    boxes = grid(6)
    found = overlaps({"x": boxes})
    mine = {rank: [o.box for o in found if rank in o.ranks and o.ranks[0] < rank] for rank in boxes}
    assert {len(remainder(box, mine[rank])) for rank, box in boxes.items()} == {1}


def test_a_box_that_would_be_cut_into_many_is_written_whole() -> None:
    comb = [Box((2 * i,), (1,)) for i in range(MAX_PIECES + 5)]
    box = Box((0,), (1000,))
    assert remainder(box, comb) == (box,)
    assert len(remainder(box, comb[: MAX_PIECES // 2])) == MAX_PIECES // 2


@pytest.mark.parametrize(
    ("boxes", "fits"),
    [
        ([Box((0, i), (100_000, 1)) for i in range(50_000)], True),
        ([Box((i, 0), (1, 100_000)) for i in range(50_000)], True),
        ([Box((i,), (2_000,)) for i in range(50_000)], False),
        ([Box((i, 0), (1, 9**6)) if i % 2 else Box((0, i), (9**6, 1)) for i in range(2_000)], False),
        ([Box((i, 0), (1, 40_000)) if i < 40_000 else Box((9**6, i), (9**6, 1)) for i in range(80_000)], False),
    ],
    ids=["columns", "rows", "too many", "crosses", "no dim tells"],
)
def test_time_is_bounded(boxes: list[Box], fits: bool) -> None:
    began = time.process_time()
    if fits:
        assert overlapping(boxes) == []
    else:
        with pytest.raises(UnsupportedState, match=r"its .* boxes overlap in more ways"):
            overlapping(boxes)
    assert time.process_time() - began < 5
