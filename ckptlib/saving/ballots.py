"""Ballots, by which all ranks find out together whether the replicas in a snapshot are alike.

Each rank tells its check with the beat as soon as its snapshot is sealed, and repeats it until all have; a rank without
a snapshot says so. Every rank comes to the same verdict at the same step. Main thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptlib.format.check import add_up
from ckptlib.staging.replica_digests import Reading
from ckptlib.staging.stager import Staging

AT_ONCE = 8
"""How many snapshots are voted on with one beat: more than there are slots. Others wait."""

_TOLD, _FAILED, _LOW, _HIGH = range(4)
_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Ballot:
    """A snapshot that was begun on all ranks without comparing it first."""

    step: int
    number: int
    """See `SlotHeader.number`."""
    persists: bool
    staging: Staging | None
    """This rank's copy; None if it has none."""
    reading: Reading | None

    def vote(self) -> list[int]:
        """Returns this rank's vote, which is added to those of the others."""
        if self.staging is None or (self.staging.done and self.staging.error is not None):
            return [1, 1, 0, 0]
        if not self.staging.done:
            return [0] * _WIDTH
        return [1, 0, self.staging.check.low, self.staging.check.high]


class Poll(NamedTuple):
    """This rank's votes."""

    ballots: tuple[Ballot, ...]
    votes: list[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """All ranks' verdict on one snapshot."""

    ballot: Ballot
    alike: bool
    """Whether it is whole and alike on all ranks."""
    differs: bool
    """Whether it is whole on all ranks, but differs."""


class Ballots:
    """The open ballots of one rank: the same snapshots in the same order on every rank."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: list[Ballot] = []
        self._new: list[Ballot] = []
        """Ballots begun since the last poll. The beat of their own step leaves them out: nobody has begun to copy."""

    def begin(self, ballot: Ballot) -> None:
        if self._num_ranks > 1:
            self._new.append(ballot)

    def poll(self) -> Poll:
        """Returns this rank's votes, as many on each rank; none if there is nothing to vote on."""
        ballots = tuple(self._open[:AT_ONCE])
        self._open, self._new = self._open + self._new, []
        votes = [vote for ballot in ballots for vote in ballot.vote()]
        return Poll(ballots, votes + [0] * (_WIDTH * (AT_ONCE - len(ballots))) if ballots else [])

    def conclude(self, poll: Poll, sums: Sequence[int]) -> list[Verdict]:
        """Returns verdicts on the snapshots that all ranks have voted on. `sums`: the votes of this poll, added over
        all ranks."""
        found = []
        for i, ballot in enumerate(poll.ballots):
            of_all = sums[i * _WIDTH : (i + 1) * _WIDTH]
            if of_all[_TOLD] == self._num_ranks and ballot in self._open:
                self._open.remove(ballot)
                whole, same = not of_all[_FAILED], add_up(of_all[_LOW], of_all[_HIGH])
                found.append(Verdict(ballot, whole and same, whole and not same))
        return found
