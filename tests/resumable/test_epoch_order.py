"""ckptlib.data.order: a permutation for every length, a fair one, and the same one for ever."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.data.order import MAX_LENGTH, shuffled


def order(length: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return shuffled(np.arange(length, dtype=np.uint64), length, seed, epoch).tolist()


@pytest.mark.parametrize("length", [*range(1, 70), 255, 256, 257, 4095, 4096, 4097, 65_537])
def test_each_item_has_one_place(length: int) -> None:
    assert sorted(order(length)) == list(range(length))


@settings(deadline=None)
@given(st.integers(1, MAX_LENGTH), st.integers(0, 2**70), st.integers(0, 2**40), st.data())
def test_places_of_any_length(length: int, seed: int, epoch: int, data: st.DataObject) -> None:
    """No list of the items is made: a length that fits in no memory."""
    places = data.draw(st.lists(st.integers(0, length - 1), unique=True, min_size=1, max_size=50))
    items = shuffled(np.array(places, dtype=np.uint64), length, seed, epoch).tolist()
    assert len({*items}) == len(items)
    assert all(0 <= item < length for item in items)
    alone = [shuffled(np.array([place], dtype=np.uint64), length, seed, epoch).item() for place in places[:5]]
    assert alone == items[:5]


@pytest.mark.parametrize("length", [3, 4])
def test_every_permutation_is_as_likely(length: int) -> None:
    """Chi-square over the epochs of one seed, and over the seeds of one epoch; the bounds are those of one in 10**4."""
    orders = list(itertools.permutations(range(length)))
    bound = {6: 25.7, 24: 56.0}[len(orders)]
    for drawn in (lambda i: order(length, epoch=i), lambda i: order(length, seed=i)):
        expected = 20.0
        counts = Counter(tuple(drawn(i)) for i in range(int(expected) * len(orders)))
        assert sum((counts[o] - expected) ** 2 / expected for o in orders) < bound


def test_neighbours_have_nothing_to_do_with_each_other() -> None:
    items = np.array(order(50_000), dtype=float)
    others = np.array(order(50_000, epoch=1), dtype=float)
    for one, other in [(items[:-1], items[1:]), (items, np.arange(len(items))), (items, others)]:
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.02


def test_never_changes() -> None:
    """Checkpoints in the middle of an epoch depend on it. Written down when the order was made."""
    assert order(10, seed=1, epoch=2) == TEN
    big = shuffled(np.array([0, 1, 10**12 - 1], dtype=np.uint64), 10**12, 3, 4).tolist()
    assert big == BIG


TEN = [8, 1, 9, 0, 3, 7, 6, 2, 5, 4]
BIG = [733422765098, 686318174609, 932321875465]
