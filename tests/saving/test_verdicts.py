"""What a rank does by the verdict on a snapshot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ckptlib.format.check import check_of
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.saving.verdicts import Verdicts

SAVE = SaveId(7, GenerationId(1, "0" * 8))
NUMBER = 3


class Rank:
    """Rank 0 of two, and what it was told of one snapshot."""

    def __init__(self) -> None:
        self.voided: list[tuple[str, int]] = []
        self.moved: list[frozenset[str]] = []
        self.planner = SimpleNamespace(must_compare=False, note_moved=self.moved.append)
        snapshots = SimpleNamespace(void=lambda step: self.voided.append(("memory", step)))
        tier = SimpleNamespace(void=lambda step: self.voided.append(("disks", step)))
        listener = SimpleNamespace(tell=lambda event: None)
        outcomes = SimpleNamespace(tier=tier, forget=lambda save, error: True, listener=listener)
        group = SimpleNamespace(size=2, rank=0)
        given: Any = (group, SAVE.generation, self.planner, snapshots, outcomes)
        self.verdicts = Verdicts(*given)

    def conclude(self, other: bytes, persists: bool, compared: int = 0) -> None:
        """`other`: the digest of the other rank; this one's is "a". `compared`: before the save of this number."""
        staged: Any = [
            SimpleNamespace(done=True, error=None, check=check_of(NUMBER, rank, {(0, 1): digest}))
            for rank, digest in enumerate([b"a", other])
        ]
        reading: Any = SimpleNamespace(moved=frozenset({"ema"}))
        self.verdicts.vote(SAVE, NUMBER, persists, staged[0], reading)
        self.verdicts.poll()  # of the beat of its own step
        poll = self.verdicts.poll()
        theirs = [1, 0, staged[1].check.low, staged[1].check.high]
        self.verdicts.compared(compared)
        self.verdicts.conclude(poll, [sum(votes) for votes in zip(poll.votes, theirs + [0] * 99, strict=False)])


def test_what_is_alike_is_kept_and_says_which_parameters_move() -> None:
    rank = Rank()
    rank.conclude(b"a", persists=True)
    assert (rank.voided, rank.moved) == ([], [frozenset({"ema"})])
    assert not rank.planner.must_compare


@pytest.mark.parametrize("persists", [False, True])
def test_what_differs_is_worth_nothing_wherever_it_is(persists: bool) -> None:
    """Nor does it say which parameters move: each rank may have seen others move."""
    rank = Rank()
    rank.conclude(b"b", persists)
    assert rank.voided == [("memory", 7), ("disks", 7)][: 1 + persists]
    assert rank.moved == []
    assert rank.planner.must_compare
    assert [ballot.number for ballot in rank.verdicts.take_differing()] == [NUMBER]


@pytest.mark.parametrize("compared", [NUMBER, NUMBER + 1])
def test_what_differed_before_the_ranks_compared_is_not_owed_again(compared: int) -> None:
    rank = Rank()
    rank.conclude(b"b", persists=True, compared=compared)
    assert rank.voided == [("memory", 7), ("disks", 7)]
    assert not rank.planner.must_compare
    assert rank.verdicts.take_differing() == []
