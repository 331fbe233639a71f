"""Ballots: all ranks together find whether the replicas in a snapshot are alike.

Each rank tells its check as soon as its snapshot is sealed, with the beat, and goes on telling it until all have; one
without a snapshot says so. Every rank concludes the same at the same step. Main thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptlib.format.check import add_up
from ckptlib.staging.replica_digests import Reading
from ckptlib.staging.stager import Staging

AT_ONCE = 8
"""Snapshots that are voted upon with one beat: more than there are slots for. Others wait."""

_TOLD, _FAILED, _LOW, _HIGH = range(4)
_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Ballot:
    """A snapshot that was begun on all ranks, and that they did not compare before."""

    step: int
    number: int
    """See `SlotHeader.number`."""
    persists: bool
    staging: Staging | None
    """None: there is none on this rank."""
    reading: Reading | None

    def vote(self) -> list[int]:
        """This rank's, to be added to those of the others."""
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
    """Whether it is whole on all ranks, and alike."""
    differs: bool
    """Whether it is whole on all of them, and not alike."""


class Ballots:
    """One per rank; the same snapshots in the same order on each."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: list[Ballot] = []
        self._new: list[Ballot] = []
        """Begun since the last poll. The beat of their own step says nothing of them: nobody has begun to copy."""

    def begin(self, ballot: Ballot) -> None:
        if self._num_ranks > 1:
            self._new.append(ballot)

    def poll(self) -> Poll:
        """As many votes on all ranks; none where there is nothing to vote on."""
        ballots = tuple(self._open[:AT_ONCE])
        self._open, self._new = self._open + self._new, []
        votes = [vote for ballot in ballots for vote in ballot.vote()]
        return Poll(ballots, votes + [0] * (_WIDTH * (AT_ONCE - len(ballots))) if ballots else [])

    def conclude(self, poll: Poll, sums: Sequence[int]) -> list[Verdict]:
        """Those that all ranks have voted upon. `sums`: over all ranks, of the votes of this poll."""
        found = []
        for i, ballot in enumerate(poll.ballots):
            of_all = sums[i * _WIDTH : (i + 1) * _WIDTH]
            if of_all[_TOLD] == self._num_ranks and ballot in self._open:
                self._open.remove(ballot)
                whole, same = not of_all[_FAILED], add_up(of_all[_LOW], of_all[_HIGH])
                found.append(Verdict(ballot, whole and same, whole and not same))
        return found
