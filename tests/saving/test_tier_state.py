"""What a trainer says of its local tier, and what follows from what all ranks say."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.policy.tier import MAX_UNDRAINED, LocalTier
from ckptlib.policy.when import Steps
from ckptlib.ranks.beat import Word
from ckptlib.saving.tier import TierState
from ckptlib.writer.client import Writer

GENERATION = GenerationId(1, "0" * 8)


class FakeWriter:
    """What a TierState asks of a writer."""

    def __init__(self) -> None:
        self.num_undrained = 0
        self.told: list[tuple[SaveId, int, bool]] = []
        self.needed: list[SaveId | None] = []

    def whole(self, save: SaveId, settled: int, recorded: bool) -> None:
        self.told.append((save, settled, recorded))

    def earlier(self, save: SaveId | None) -> None:
        self.needed.append(save)


@pytest.fixture
def writer() -> FakeWriter:
    return FakeWriter()


def state_of(writer: FakeWriter, rank: int = 0, tier: LocalTier | None = None) -> TierState:
    tier = tier or LocalTier(Path("/disk"), Steps(3))
    return TierState(tier, GENERATION, rank, cast("Writer", writer))


def test_a_drain_is_owed_until_one_is_taken(writer: FakeWriter) -> None:
    state = state_of(writer)
    assert [state.say(Word(step), failed=False).drain for step in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert state.decide(4, Word(4, drain=1), must=False)
    assert state.say(Word(5), failed=False).drain == 0
    assert state.say(Word(5), failed=True).drain == 1, "what failed is made good by the next save"


def test_all_ranks_decide_by_what_any_of_them_said(writer: FakeWriter, caplog: pytest.LogCaptureFixture) -> None:
    ranks = [state_of(writer, rank) for rank in (0, 1)]
    assert [state.decide(7, Word(7, drain=1, drains_full=1), must=False) for state in ranks] == [False, False]
    assert caplog.text.count("step 7 stays on local disks") == 1, "rank 0 tells it"
    assert [state.decide(8, Word(8), must=False) for state in ranks] == [False, False]
    assert "step 8" not in caplog.text, "no drain was due"
    assert [state.decide(9, Word(9, drains_full=1), must=True) for state in ranks] == [True, True]


def test_saves_that_stay_on_the_disks_in_a_row_are_told_of_ever_less_often(
    writer: FakeWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """The store may be away for days."""
    state = state_of(writer)
    for step in range(1, 11):
        assert not state.decide(step, Word(step, drain=1, drains_full=1), must=False)
    assert [record.args[0] for record in caplog.records if isinstance(record.args, tuple)] == [1, 2, 4, 8]
    assert state.decide(11, Word(11, drain=1), must=False)
    assert not state.decide(12, Word(12, drain=1, drains_full=1), must=False)
    assert "step 12 stays on local disks" in caplog.text, "another outage"


def test_a_rank_says_that_it_has_enough_to_drain(writer: FakeWriter) -> None:
    state = state_of(writer)
    for num in range(MAX_UNDRAINED + 2):
        writer.num_undrained = num
        assert state.say(Word(1), failed=False).drains_full == int(num >= MAX_UNDRAINED)


def test_the_writer_is_told_what_all_ranks_have(writer: FakeWriter) -> None:
    states = [state_of(writer, rank) for rank in (0, 1)]
    for step, held in ((1, (True, True)), (2, (True, False)), (3, (True, True))):
        for state, ok in zip(states, held, strict=True):
            state.expect(step)
            state.note(step, ok)
            state.note(step, True)  # told twice: the first word counts
    words = [state.say(Word(4), failed=False) for state in states]
    oldest, since = min(state.own.newest for state in states), max(word.local_since for word in words)
    for state in states:
        state.note_all(oldest, since, 3, unrecorded=False)
        state.note_all(oldest, since, 3, unrecorded=False)
    assert writer.told == [(SaveId(3, GENERATION), 3, True)] * 2
    states[0].note_all(2, 3, 3, unrecorded=False)
    assert len(writer.told) == 2, "step 2 failed on some rank"
    states[0].note_all(3, 5, 4, unrecorded=False)
    assert writer.told[2:] == [(SaveId(3, GENERATION), 4, True)], "what only some ranks have of step 4 may go"


def test_the_writer_is_told_when_the_record_is_there(writer: FakeWriter) -> None:
    """What is whole meanwhile can be restored without, so it is told before."""
    state = state_of(writer)
    for unrecorded in (True, True, False, False):
        state.note_all(3, 0, 3, unrecorded)
    assert writer.told == [(SaveId(3, GENERATION), 3, False), (SaveId(3, GENERATION), 3, True)]


def test_a_save_that_this_rank_gives_up_ends_behind_those_that_the_writer_is_busy_with(writer: FakeWriter) -> None:
    state = state_of(writer)
    for step in (1, 2, 3):
        state.expect(step)
    state.note(1, True)
    state.note_failed(3)
    assert (state.own.newest, state.own.settled) == (1, 1), "of 2 nothing is known"
    state.note(2, True)
    assert (state.own.newest, state.own.since, state.own.settled) == (2, 4, 3)
    state.expect(4)
    state.note_failed(4)
    state.note(4, True)  # the first word counts
    assert (state.own.newest, state.own.since, state.own.settled) == (2, 5, 4)


def test_a_save_of_which_the_writer_never_says_anything_holds_up_no_later_one(writer: FakeWriter) -> None:
    state = state_of(writer)
    for step in (1, 2, 3):
        state.expect(step)
    state.note(2, True)
    assert (state.own.newest, state.own.since, state.own.settled) == (2, 2, 2)
    state.note(3, True)
    assert (state.own.newest, state.own.since, state.own.settled) == (3, 2, 3)


def test_of_earlier_jobs_the_newest_step_on_the_disks_is_needed_that_is_not_later_than_the_restored_one(
    writer: FakeWriter,
) -> None:
    state, saves = state_of(writer), [SaveId(step, GENERATION) for step in (3, 5, 8)]
    for step in (2, 5, 6, 9):
        state.note_restored(step, saves)
    assert writer.needed == [None, saves[1], saves[1], saves[2]]


def test_without_a_tier_all_goes_to_the_store(writer: FakeWriter) -> None:
    state = TierState(None, GENERATION, 0, cast("Writer", writer))
    word = Word(1)
    assert state.say(word, failed=True) == word
    assert state.decide(1, word, must=False)
    state.expect(1)
    state.note(1, True)
    state.note_all(1, 0, 1, unrecorded=False)
    state.note_restored(1, [])
    assert writer.told == writer.needed == []


def test_a_step_that_differs_is_whole_on_no_disk_and_others_are_as_they_were(writer: FakeWriter) -> None:
    state = state_of(writer)
    for step in (100, 200, 203):
        state.expect(step)
    state.note(100, held=True)
    state.note_all(100, 0, 100, unrecorded=False)
    state.void(203)
    state.note(200, held=True)
    state.note_all(state.own.newest, state.own.since, state.own.settled, unrecorded=False)
    state.note(203, held=True)
    state.note_all(state.own.newest, state.own.since, state.own.settled, unrecorded=False)
    assert [(save.step, settled) for save, settled, _ in writer.told] == [(100, 100), (200, 200), (200, 203)]
