"""What a save writes and what it takes over: the rules, on parts made by hand."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import pytest
from helpers.handmade_parts import CHUNK_NBYTES, NOW, digest_of, pack, part_of, save_id
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.format.keys import PackSet, SaveId
from ckptlib.format.part import Part
from ckptlib.format.places import Base, Coding, Loss
from ckptlib.writer.increment import (
    FEWER_USES,
    LIVE_SHARE,
    MAX_USES,
    STAGGER,
    Increment,
    Rules,
    plan,
    unchanged,
    whole,
    without_base,
)

DAY_S = 86400.0
WEEK_S = 7 * DAY_S


def rules(
    committed: Iterable[SaveId] = (), now: float = NOW, distrusted: Collection[SaveId] = (), refresh_s: float = WEEK_S
) -> Rules:
    return Rules(now, refresh_s, {*committed}, distrusted)


def digests(values: Iterable[object]) -> list[str]:
    return [digest_of(value) for value in values]


def one_pack(num: int, created: float = NOW, nbytes: int | None = None) -> Part:
    """Of save 1, all in one pack that has nothing else."""
    size = num * CHUNK_NBYTES if nbytes is None else nbytes
    return part_of(save_id(1), range(num), [pack(save_id(1), created, size)], [0] * num)


# -- what changed


def test_nothing_changed() -> None:
    parent = one_pack(5)
    assert plan(parent.digests, parent, rules([save_id(1)])) == Increment((0, 1, 2, 3, 4), (), ())


def test_what_changed_is_written_and_the_rest_is_not() -> None:
    found = plan(digests([0, "x", 2, "y", 4]), one_pack(5), rules([save_id(1)]))
    assert found == Increment((0, 2, 4), (1, 3), ())
    assert found.written == (1, 3)


def test_chunks_that_changed_places_have_changed() -> None:
    """A place is a place in the table: equal bytes elsewhere are no match."""
    found = plan(digests([1, 0]), one_pack(2), rules([save_id(1)]))
    assert found == Increment((), (0, 1), ())


def test_a_table_without_chunks() -> None:
    parent = part_of(save_id(1), [], [], [])
    assert plan([], parent, rules([save_id(1)])) == whole(0) == Increment((), (), ())


def test_whole() -> None:
    assert whole(3) == Increment((), (0, 1, 2), ())
    assert whole(3).written == (0, 1, 2)


def test_a_lossy_chunk_is_compared_by_what_it_was_before() -> None:
    """Its digest is that of what a load gives back, which no snapshot ever has."""
    coding = Coding("lossy", 10, None, Loss(digest_of("raw"), 0.5, 0.1))
    parent = part_of(save_id(1), ["decoded", 1], [pack(save_id(1))], [0, 0], {0: coding})
    assert unchanged(digests(["raw", 1]), parent) == [0, 1]
    assert unchanged(digests(["decoded", 1]), parent) == [1]


def test_tables_of_different_lengths_are_a_bug() -> None:
    with pytest.raises(ValueError, match="zip"):
        unchanged(digests([0]), one_pack(2))


# -- refresh


def taken_at(parent: Part, age_s: float) -> set[int]:
    return {*plan(parent.digests, parent, rules([save_id(1)], now=NOW + age_s)).taken}


def test_nothing_older_than_the_refresh_is_referred_to() -> None:
    parent = one_pack(1000)
    assert taken_at(parent, WEEK_S + 1) == set()


def test_nothing_young_is_written_again() -> None:
    parent = one_pack(1000)
    assert taken_at(parent, WEEK_S * (1 - STAGGER)) == {*range(1000)}


def test_a_refresh_is_spread_over_the_last_part_of_the_time() -> None:
    """In each tenth of it about a tenth of the chunks; one that was due once stays due."""
    parent = one_pack(1000)
    ages = [WEEK_S * (1 - STAGGER * (10 - tenth) / 10) for tenth in range(11)]
    left = [taken_at(parent, age_s) for age_s in ages]
    for before, after in itertools.pairwise(left):
        assert after <= before
        assert 60 <= len(before) - len(after) <= 140
    assert left[-1] <= {chunk for chunk in range(1000) if chunk in left[-2]}


def test_neighbours_are_refreshed_at_different_times() -> None:
    left = taken_at(one_pack(1000), WEEK_S * (1 - STAGGER / 2))
    alike = sum((chunk in left) == (chunk + 1 in left) for chunk in range(999))
    assert alike <= 750


def test_age_is_that_of_the_pack() -> None:
    """A chunk in a pack of last week is old, whatever the save is that its part belongs to."""
    packs = [pack(save_id(1), NOW - WEEK_S - 1, 200), pack(save_id(2), NOW, 200)]
    parent = part_of(save_id(2), range(4), packs, [0, 1, 0, 1])
    found = plan(parent.digests, parent, rules([save_id(1), save_id(2)]))
    assert found == Increment((1, 3), (), (0, 2))


def test_a_base_ages_too() -> None:
    packs = [pack(save_id(1), NOW - WEEK_S - 1, 200), pack(save_id(2), NOW, 200)]
    coding = Coding("patch", 10, Base(0, 0, CHUNK_NBYTES, None, digest_of(9)))
    parent = part_of(save_id(2), range(2), packs, [1, 1], {0: coding})
    assert plan(parent.digests, parent, rules([save_id(1), save_id(2)])) == Increment((1,), (), (0,))


def test_what_has_changed_is_no_change_of_an_old_copy() -> None:
    """Its last whole copy is what counts: a base, or the chunk itself; not the frame, which is never referred to."""
    packs = [pack(save_id(1), NOW - WEEK_S - 1, 300), pack(save_id(2), NOW, 300)]
    old, young = (Coding("patch", 10, Base(number, 0, CHUNK_NBYTES, None, digest_of(9))) for number in (0, 1))
    parent = part_of(save_id(2), range(4), packs, [1, 0, 0, 1], {0: old, 1: young})
    assert without_base(digests("abcd"), parent, rules([save_id(1), save_id(2)])) == {0, 2}


def test_a_clock_that_was_set_back_refreshes_nothing() -> None:
    parent = one_pack(10)
    assert taken_at(parent, -10 * WEEK_S) == {*range(10)}


# -- distrusted


def test_what_was_put_up_to_a_distrusted_save_is_written_again() -> None:
    saves = [save_id(step) for step in (1, 2, 3)]
    parent = part_of(saves[2], range(3), [pack(save) for save in saves], [0, 1, 2])
    found = plan(parent.digests, parent, rules(saves, distrusted=saves[1:2]))
    assert found == Increment((2,), (), (0, 1))


def test_carried_packs_are_distrusted_alike() -> None:
    packs = [pack(PackSet(save_id(1), carried=True)), pack(save_id(2))]
    parent = part_of(save_id(2), range(2), packs, [0, 1])
    saves = [save_id(1), save_id(2)]
    assert plan(parent.digests, parent, rules(saves, distrusted=saves[:1])) == Increment((1,), (), (0,))


def test_a_mark_distrusts_no_pack_of_a_later_generation() -> None:
    """A job that went back to an earlier step writes lower steps than that of a mark that it left behind."""
    saves = [save_id(step, number) for step, number in ((3, 1), (4, 2), (8, 1), (6, 2))]
    parent = part_of(save_id(9, 3), range(4), [pack(save) for save in saves], [0, 1, 2, 3])
    left_behind, own = save_id(7, 1), save_id(5, 2)
    assert plan(parent.digests, parent, rules(saves, distrusted=[left_behind])) == Increment((1, 2, 3), (), (0,))
    assert plan(parent.digests, parent, rules(saves, distrusted=[own])) == Increment((2, 3), (), (0, 1))
    both = plan(parent.digests, parent, rules(saves, distrusted=[left_behind, own]))
    assert both == Increment((2, 3), (), (0, 1)), "each by itself"


# -- dead bytes


@pytest.mark.parametrize(("live", "moved"), [(1, True), (4, True), (5, False), (10, False)])
def test_what_is_left_in_a_mostly_dead_pack_moves_once_its_save_is_dropped(live: int, moved: bool) -> None:
    parent = one_pack(10)
    values = [chunk if chunk < live else "new" for chunk in range(10)]
    kept = tuple(range(live))
    dropped = plan(digests(values), parent, rules())
    assert dropped == Increment(() if moved else kept, tuple(range(live, 10)), kept if moved else ())
    assert dropped.written == tuple(range(10) if moved else range(live, 10))
    stays = plan(digests(values), parent, rules([save_id(1)]))
    assert stays == Increment(kept, tuple(range(live, 10)), ()), "its pack stays, so nothing is won"


def test_each_pack_is_judged_by_itself() -> None:
    saves = [save_id(1), save_id(2)]
    packs = [pack(saves[0], NOW, 10 * CHUNK_NBYTES), pack(saves[1], NOW, 2 * CHUNK_NBYTES)]
    parent = part_of(save_id(3), range(4), packs, [0, 0, 1, 1])
    assert plan(parent.digests, parent, rules()) == Increment((2, 3), (), (0, 1))


def test_a_base_is_in_use() -> None:
    """A pack of whole copies is not mostly dead where the chunks are patches against them, changed or not."""
    packs = [pack(save_id(1), NOW, 2 * CHUNK_NBYTES), pack(save_id(2), NOW, CHUNK_NBYTES)]
    codings = {chunk: Coding("patch", 10, Base(0, 0, CHUNK_NBYTES, None, digest_of(9))) for chunk in (0, 1)}
    parent = part_of(save_id(2), range(3), packs, [1, 1, 1], codings)
    assert plan(digests([0, "new", 2]), parent, rules([save_id(2)])) == Increment((0, 2), (1,), ())


def test_a_pack_of_which_nothing_is_used_any_more_is_no_matter() -> None:
    saves = [save_id(1), save_id(2)]
    parent = part_of(save_id(3), range(2), [pack(save, nbytes=CHUNK_NBYTES) for save in saves], [0, 1])
    assert plan(digests(["new", 1]), parent, rules()) == Increment((1,), (0,), ())


# -- many sets


def with_sets(num: int, sizes: Sequence[int] | None = None) -> Part:
    """Each pack of another save; `sizes`: chunks of each."""
    sizes = sizes or [1] * num
    numbers = [number for number in range(num) for _ in range(sizes[number])]
    packs = [pack(save_id(number + 1), NOW, sizes[number] * CHUNK_NBYTES) for number in range(num)]
    return part_of(save_id(num + 1), range(len(numbers)), packs, numbers)


def used(parent: Part, found: Increment) -> set[int]:
    return {parent.table.packs[chunk] for chunk in found.taken}


def test_up_to_so_many_sets_are_used() -> None:
    parent = with_sets(MAX_USES - 1)
    assert len(used(parent, plan(parent.digests, parent, rules()))) == MAX_USES - 1


@pytest.mark.parametrize("num", [MAX_USES, MAX_USES + 50])
def test_beyond_that_those_with_the_fewest_bytes_are_written_again(num: int) -> None:
    sizes = [1 + number % 3 for number in range(num)]
    parent = with_sets(num, sizes)
    found = plan(parent.digests, parent, rules(save_id(n + 1) for n in range(num)))
    left = used(parent, found)
    assert len(left) == FEWER_USES
    assert max(sizes[n] for n in {*range(num)} - left) <= min(sizes[n] for n in left)
    assert not found.changed


def test_packs_of_one_set_count_once_and_go_together() -> None:
    packs = [pack(save_id(1), NOW, CHUNK_NBYTES, number) for number in range(MAX_USES + 10)]
    parent = part_of(save_id(2), range(len(packs)), packs, range(len(packs)))
    assert plan(parent.digests, parent, rules()).carried == ()


def test_sets_of_which_nothing_is_left_do_not_count() -> None:
    """Whether their steps are there still, or not."""
    num, num_left = MAX_USES + 10, FEWER_USES + 1
    parent = with_sets(num)
    values = [chunk if chunk < num_left else "new" for chunk in range(num)]
    for committed in ([], [save_id(number + 1) for number in range(num)]):
        assert plan(digests(values), parent, rules(committed)).taken == tuple(range(num_left))


# -- whatever comes


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[str], Part, Rules]:
    num_packs = draw(st.integers(1, 6))
    steps = [draw(st.integers(1, 5)) for _ in range(num_packs)]
    packs = [
        pack(
            PackSet(save_id(step, draw(st.integers(1, 2))), draw(st.booleans())),
            NOW - draw(st.floats(0, 2)) * WEEK_S,
            draw(st.integers(8, 40)) * CHUNK_NBYTES,
            number,
        )
        for number, step in enumerate(steps)
    ]
    numbers = draw(st.lists(st.integers(0, num_packs - 1), max_size=8))
    parent = part_of(save_id(9), range(len(numbers)), packs, numbers)
    values = [draw(st.sampled_from([chunk, "new"])) for chunk in range(len(numbers))]
    saves = st.builds(save_id, st.integers(1, 5), st.integers(1, 2))
    distrusted = draw(st.sets(saves, max_size=2))
    return digests(values), parent, rules(draw(st.sets(saves)), NOW, distrusted)


@given(cases())
def test_each_chunk_is_in_one_place_and_only_equal_ones_are_taken(case: tuple[list[str], Part, Rules]) -> None:
    snapshot, parent, given_rules = case
    found = plan(snapshot, parent, given_rules)
    for some in (found.taken, found.changed, found.carried, found.written):
        assert list(some) == sorted({*some})
    assert sorted(found.taken + found.changed + found.carried) == list(range(len(snapshot)))
    assert sorted(found.changed + found.carried) == list(found.written)
    assert {chunk for chunk in found.taken + found.carried if snapshot[chunk] != parent.digests[chunk]} == set()
    assert {chunk for chunk in found.changed if snapshot[chunk] == parent.digests[chunk]} == set()
    for chunk in found.taken:
        its = parent.packs[parent.table.packs[chunk]]
        assert given_rules.now - its.created <= given_rules.refresh_s
    assert plan(snapshot, parent, given_rules) == found


@given(cases())
def test_what_stays_in_a_dropped_save_is_half_of_its_pack_at_least(case: tuple[list[str], Part, Rules]) -> None:
    """As seen by the parent: what is refreshed beside it may be more than that."""
    snapshot, parent, given_rules = case
    for chunk in plan(snapshot, parent, given_rules).taken:
        its = parent.packs[parent.table.packs[chunk]]
        same = [
            other
            for other in range(len(snapshot))
            if snapshot[other] == parent.digests[other] and parent.packs[parent.table.packs[other]] is its
        ]
        of = its.key.split("/")[1]
        if of not in {str(save) for save in given_rules.committed}:
            assert len(same) * CHUNK_NBYTES >= LIVE_SHARE * its.nbytes
