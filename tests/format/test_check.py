"""Checks of ranks: they add up to zero where all that is held in common is alike, and not otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.format.check import MODULUS, Check, add_up, alike, check_of, compared

SETS = st.lists(st.sets(st.integers(0, 7), min_size=2), max_size=8, unique_by=frozenset)


def checks(sets: list[set[int]], digests: dict[tuple[int, int], bytes], number: int = 5) -> list[Check]:
    """One of each of 8 ranks. `digests`: by set and rank, where it is not what the others have."""
    return [
        check_of(
            number,
            rank,
            {tuple(sorted(ranks)): digests.get((i, rank), b"%d" % i) for i, ranks in enumerate(sets) if rank in ranks},
        )
        for rank in range(8)
    ]


@settings(deadline=None)
@given(SETS, st.integers(0, 2**40))
def test_where_all_sets_agree_so_do_the_checks(sets: list[set[int]], number: int) -> None:
    assert alike(checks(sets, {}, number))


@settings(deadline=None)
@given(SETS.filter(bool), st.data())
def test_one_rank_that_differs_in_one_set_is_enough(sets: list[set[int]], data: st.DataObject) -> None:
    which = data.draw(st.integers(0, len(sets) - 1))
    rank = data.draw(st.sampled_from(sorted(sets[which])))
    assert not alike(checks(sets, {(which, rank): b"other"}))


def test_two_halves_that_differ_do_not_cancel() -> None:
    ranks = {*range(8)}
    for odd in range(1, 255):  # whoever differs in the same way
        digests = {(0, rank): b"other" for rank in ranks if odd >> rank & 1}
        assert not alike(checks([ranks], digests)), odd


def test_swapped_contents_of_two_sets_do_not_cancel() -> None:
    sets = [{0, 1}, {0, 1, 2}]
    swapped = {(0, 0): b"1", (1, 0): b"0"}
    assert not alike(checks(sets, swapped))


def test_snapshots_of_two_numbers_are_no_snapshot() -> None:
    assert alike([compared(7), compared(7)])
    assert not alike([compared(7), compared(8)])


def test_parts_from_before_there_were_checks() -> None:
    assert alike([None, None])
    assert not alike([None, compared(1)])
    assert alike([])


@given(st.integers(0, 2**32 - 1), st.integers(0, MODULUS - 1), st.integers(0, MODULUS - 1))
def test_texts_come_back(number: int, low: int, high: int) -> None:
    check = Check(number, low, high)
    assert len(str(check)) == 28
    assert Check.parse(str(check)) == check


@pytest.mark.parametrize("text", ["", "0" * 27, "0" * 29, "G" + "0" * 27, "0" * 8 + f"{MODULUS:010x}" + "0" * 10])
def test_what_is_no_check_is_none(text: str) -> None:
    assert Check.parse(text) is None


@pytest.mark.parametrize("sums", [(1, 0), (0, 1), (MODULUS, 1), (MODULUS - 1, 2 * MODULUS)])
def test_both_sums_count(sums: tuple[int, int]) -> None:
    assert not add_up(*sums)
    assert add_up(0, 3 * MODULUS)
