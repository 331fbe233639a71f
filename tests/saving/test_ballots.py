"""Voting upon snapshots: every rank concludes the same, when all have told, and not before."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.format.check import check_of
from ckptlib.saving.ballots import AT_ONCE, Ballot, Ballots


class Staged:
    """What a ballot asks of a snapshot."""

    def __init__(self, rank: int, number: int, digest: bytes) -> None:
        self.done = False
        self.error: Exception | None = None
        self.check = check_of(number, rank, {(0, 1, 2): digest})


class Job:
    """Three ranks that vote at every beat; `snapshots` by number, and by rank."""

    def __init__(self) -> None:
        self.ranks = [Ballots(3) for _ in range(3)]
        self.snapshots: dict[int, list[Staged | None]] = {}
        self.found: dict[int, tuple[bool, bool]] = {}

    def begin(self, number: int, digests: str) -> None:
        """`digests`: a letter for each rank; "-": it could not begin one."""
        self.snapshots[number] = [None if d == "-" else Staged(r, number, d.encode()) for r, d in enumerate(digests)]
        for rank, ballots in enumerate(self.ranks):
            staged: Any = self.snapshots[number][rank]
            ballots.begin(Ballot(10 * number, number, True, staged, None))

    def seal(self, number: int, rank: int, error: Exception | None = None) -> None:
        staged = self.snapshots[number][rank]
        if staged is not None:
            staged.done, staged.error = True, error

    def beat(self, delayed: bool = False) -> None:
        polls = [ballots.poll() for ballots in self.ranks]
        assert len({len(poll.votes) for poll in polls}) == 1
        if delayed:  # a second round, as while a slot is waited for, before the first one's end
            self.beat()
        sums = [sum(column) for column in zip(*(poll.votes for poll in polls), strict=True)]
        told = [
            [(v.ballot.number, v.alike, v.differs) for v in ballots.conclude(poll, sums)]
            for ballots, poll in zip(self.ranks, polls, strict=True)
        ]
        assert told[0] == told[1] == told[2]
        for number, alike, differs in told[0]:
            assert number not in self.found
            self.found[number] = alike, differs


def test_nothing_is_concluded_before_all_have_told() -> None:
    job = Job()
    job.begin(1, "aaa")
    for rank in range(3):
        job.beat()
        assert job.found == {}
        job.seal(1, rank)
    job.beat()
    assert job.found == {1: (True, False)}
    assert all(ballots.poll().votes == [] for ballots in job.ranks), "nothing is left to vote upon"


def test_what_differs_differs_and_what_failed_is_neither() -> None:
    job = Job()
    for number, digests in enumerate(["aab", "abb", "a-a", "bbb", "-b-"], 1):
        job.begin(number, digests)
        for rank in range(3):
            job.seal(number, rank)
    job.begin(6, "aaa")
    for rank in range(3):
        job.seal(6, rank, OSError("full") if rank == 1 else None)
    job.beat()
    assert job.found == {}, "the beat of their own step votes upon nothing"
    job.beat()
    neither = (False, False)
    assert job.found == {1: (False, True), 2: (False, True), 3: neither, 4: (True, False), 5: neither, 6: neither}


def test_one_rank_votes_upon_nothing() -> None:
    alone = Ballots(1)
    alone.begin(Ballot(1, 1, True, None, None))
    assert alone.poll().votes == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(["aaa", "aba", "--a", "aab", "bbb"]), min_size=1, max_size=2 * AT_ONCE), st.data())
def test_whatever_order_they_come_in(digests: list[str], data: st.DataObject) -> None:
    job = Job()
    events = [(number, rank) for number in range(1, len(digests) + 1) for rank in range(3)]
    for number, letters in enumerate(digests, 1):
        job.begin(number, letters)
    for number, rank in data.draw(st.permutations(events)):
        job.seal(number, rank)
        if data.draw(st.booleans()):
            job.beat(delayed=data.draw(st.booleans()))
    for _ in range(4):
        job.beat()
    for number, letters in enumerate(digests, 1):
        whole, same = "-" not in letters, len({*letters}) == 1
        assert job.found[number] == (whole and same, whole and not same)
