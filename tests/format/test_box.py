"""box against numpy: an array of marks is the oracle."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.errors import FormatError
from ckptlib.format.box import Box, Run, boxes_of_range, common_run, find_hole

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = [draw(st.integers(0, n)) for n in shape]
    return Box(tuple(offset), tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, offset, strict=True)))


@st.composite
def shape_and_boxes(draw: st.DrawFn, num: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(SHAPES)
    return shape, [draw(boxes_in(shape)) for _ in range(num)]


@st.composite
def outer_and_pieces(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, list[Box]]:
    shape = draw(SHAPES)
    pieces = draw(st.lists(boxes_in(shape), max_size=5))
    return shape, draw(boxes_in(shape)), pieces


@st.composite
def shape_and_range(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    first = draw(st.integers(0, math.prod(shape)))
    return shape, first, draw(st.integers(0, math.prod(shape)))


def marks(shape: tuple[int, ...], box: Box) -> np.ndarray:
    """True on the elements of `box`, found without slices: by the coordinates of every element."""
    inside = np.ones(shape, dtype=bool)
    for d, index in enumerate(np.indices(shape)):
        inside &= (index >= box.offset[d]) & (index < box.offset[d] + box.shape[d])
    return inside


@given(shape_and_boxes(2))
def test_intersect_is_the_common_elements(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    common = marks(shape, a) & marks(shape, b)
    found = a.intersect(b)
    assert found == b.intersect(a)
    assert (found is None) == (not common.any())
    if found is not None:
        assert np.array_equal(marks(shape, found), common)


@given(shape_and_boxes(2))
def test_within_has_no_element_outside(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    stray = bool((marks(shape, a) & ~marks(shape, b)).any())
    if a.numel:
        assert a.within(b) == (not stray)
    assert a.within(a)
    assert a.within(Box.whole(shape))


@given(shape_and_boxes(1))
def test_slices_numel_and_flat_range(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = case
    flat = np.arange(math.prod(shape)).reshape(shape)
    assert np.array_equal(np.sort(flat[box.slices()], axis=None), flat[marks(shape, box)])
    assert flat[box.slices()].size == box.numel
    if box.numel:
        assert box.flat_range(shape) == (flat[box.slices()].min(), flat[box.slices()].max() + 1)
    else:
        assert box.flat_range(shape) == (0, 0)


@given(shape_and_boxes(2))
def test_relative_to_moves_and_keeps_shape(case: tuple[tuple[int, ...], list[Box]]) -> None:
    _, (a, b) = case
    moved = a.relative_to(b.offset)
    assert moved.shape == a.shape
    assert moved.relative_to([-x for x in b.offset]) == a


@given(shape_and_boxes(1), st.integers(1, 40))
def test_split_has_each_element_once_in_order(case: tuple[tuple[int, ...], list[Box]], most: int) -> None:
    shape, (box,) = case
    flat = np.arange(math.prod(shape)).reshape(shape)
    pieces = [*box.split(most)]
    assert max(piece.numel for piece in pieces) <= most
    seen = np.concatenate([flat[piece.slices()].ravel() for piece in pieces])
    assert np.array_equal(seen, flat[box.slices()].ravel())


@given(shape_and_range())
def test_boxes_of_range_are_the_range_in_order_and_contiguous(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, first, last = case
    flat = np.arange(math.prod(shape)).reshape(shape)
    found = list(boxes_of_range(shape, first, last))
    seen: list[int] = []
    for start, box in found:
        elements = flat[marks(shape, box)].tolist()
        assert elements == list(range(start, start + box.numel))  # contiguous, and where it says
        assert box.numel > 0
        seen += elements
    assert seen == list(range(first, last))
    assert len(found) <= max(1, 2 * len(shape) - 1)


@given(outer_and_pieces())
def test_find_hole(case: tuple[tuple[int, ...], Box, list[Box]]) -> None:
    shape, outer, pieces = case
    counts = sum((marks(shape, p).astype(int) for p in pieces), np.zeros(shape, dtype=int))
    inside = marks(shape, outer)
    hole = find_hole(outer, pieces)
    assert (hole is None) == bool((counts[inside] > 0).all())
    if hole is not None:
        assert hole.numel > 0
        assert hole.within(outer)
        assert (counts[marks(shape, hole)] == 0).all()


def partition(outer: Box, num: int, rng: random.Random) -> list[Box]:
    """`outer` cut in two, one half of it in two, and so on."""
    boxes = [outer]
    while len(boxes) < num:
        at = rng.randrange(len(boxes))
        box, d = boxes[at], rng.randrange(outer.ndim)
        if box.shape[d] > 1:
            length = rng.randrange(1, box.shape[d])
            shape = [n if i != d else length for i, n in enumerate(box.shape)]
            rest = [n if i != d else n - length for i, n in enumerate(box.shape)]
            offset = [a if i != d else a + length for i, a in enumerate(box.offset)]
            boxes[at : at + 1] = [Box(box.offset, tuple(shape)), Box(tuple(offset), tuple(rest))]
    rng.shuffle(boxes)
    return boxes


@pytest.mark.parametrize(("ndim", "num"), [(1, 20_000), (2, 5_000), (3, 2_000), (4, 1_000), (6, 500), (64, 40)])
def test_thousands_of_boxes_in_many_dims(ndim: int, num: int) -> None:
    """A grid of all their edges would have up to 10**18 cells."""
    outer = Box((7,) * ndim, (10**6 if ndim == 1 else 10_000 if ndim < 16 else 2,) * ndim)
    boxes = partition(outer, num, random.Random(ndim))
    assert find_hole(outer, boxes) is None
    hole = find_hole(outer, boxes[1:])
    assert hole is not None
    assert hole.numel > 0
    assert hole.within(boxes[0])


def test_boxes_that_are_cut_to_be_hard_are_refused() -> None:
    rng = random.Random(0)
    outer = Box.whole((1000,) * 8)
    boxes = partition(outer, 20_000, rng)
    with pytest.raises(FormatError, match=r"20,000 boxes cut \[0:1000, .* too finely"):
        find_hole(outer, boxes)


def test_a_scalar_is_one_element() -> None:
    scalar = Box.whole(())
    assert scalar.numel == 1
    assert scalar.intersect(scalar) == scalar
    assert scalar.flat_range(()) == (0, 1)
    assert list(boxes_of_range((), 0, 1)) == [(0, scalar)]
    assert find_hole(scalar, []) == scalar
    assert find_hole(scalar, [scalar]) is None


def test_mixed_numbers_of_dims_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Box.whole((2,)).intersect(Box.whole((2, 2)))
    with pytest.raises(ValueError, match="zip"):
        Box.whole((2, 2)).within(Box.whole((2,)))


def test_a_box_prints_as_slices() -> None:
    assert str(Box((0, 4), (2, 3))) == "[0:2, 4:7]"


@pytest.mark.parametrize("shape", [(), (4,), (3, 3), (2, 1, 2)])
def test_a_common_run_is_what_lies_side_by_side_in_both(shape: tuple[int, ...]) -> None:
    """Of all pairs of boxes, empty ones included."""
    numbers = np.arange(math.prod(shape)).reshape(shape)
    spans = [[(a, n) for a in range(size + 1) for n in range(size + 1 - a)] for size in shape]
    boxes = [Box(tuple(a for a, _ in span), tuple(n for _, n in span)) for span in itertools.product(*spans)]
    for one, other in itertools.product(boxes, boxes):
        flat, wanted = numbers[one.slices()].ravel(), numbers[other.slices()].ravel()
        common = np.intersect1d(flat, wanted)
        at = [np.flatnonzero(np.isin(array, common)) for array in (flat, wanted)]
        expected = None
        if common.size and all(found[-1] - found[0] + 1 == common.size for found in at):
            expected = Run(int(at[0][0]), int(at[1][0]), common.size)
        assert common_run(one, other) == expected
