"""Verdicts on snapshots that ranks did not compare before: alike, and kept; or not, and given up by all."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckptlib.errors import ReplicasDiffer
from ckptlib.events import Voided
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.ranks.group import Group
from ckptlib.saving.ballots import Ballot, Ballots, Poll
from ckptlib.saving.outcome import Outcomes
from ckptlib.saving.planner import Planner
from ckptlib.saving.snapshots import Snapshots
from ckptlib.staging.replica_digests import Reading
from ckptlib.staging.stager import Staging

log = logging.getLogger(__name__)


class Verdicts:
    """One per rank; all ranks come to the same ones at the same step. Main thread."""

    def __init__(
        self, group: Group, generation: GenerationId, planner: Planner, snapshots: Snapshots, outcomes: Outcomes
    ) -> None:
        self._group = group
        self._generation = generation
        self._planner = planner
        self._snapshots = snapshots
        self._outcomes = outcomes
        self._ballots = Ballots(group.size)
        self._compared = 0
        """The number of the last save that the ranks compared before."""
        self._differing: list[Ballot] = []
        """Given up, and nobody has taken note of it yet."""

    def compared(self, number: int) -> None:
        """All ranks compared their replicas before the save of this number."""
        self._compared = number

    def vote(self, save: SaveId, number: int, to_store: bool, staging: Staging | None, reading: Reading | None) -> None:
        """The ranks find out with the next beats whether this snapshot is alike. `staging`: None where it failed."""
        self._ballots.begin(Ballot(save.step, number, to_store, staging, reading))

    def poll(self) -> Poll:
        """This rank's votes."""
        return self._ballots.poll()

    def conclude(self, poll: Poll, sums: Sequence[int]) -> None:
        """Acts upon the verdicts. `sums`: of their votes in this poll."""
        for verdict in self._ballots.conclude(poll, sums):
            ballot = verdict.ballot
            if verdict.alike and ballot.reading is not None:
                self._planner.note_moved(ballot.reading.moved)
            if verdict.differs:
                self._give_up(ballot)

    def take_differing(self) -> list[Ballot]:
        """Those given up since this was last asked."""
        differing, self._differing = self._differing, []
        return differing

    def _give_up(self, ballot: Ballot) -> None:
        """The writers may put their parts still; nobody commits these."""
        self._snapshots.void(ballot.step)
        if ballot.persists:
            self._outcomes.tier.void(ballot.step)
        if ballot.number > self._compared:  # else a later one is there already
            self._planner.must_compare = True
            self._differing.append(ballot)
        error = ReplicasDiffer(
            f"step {ballot.step} is not kept: tensors that several ranks hold as replicas, and one writes for all, "
            "differ between ranks"
        )
        untold = self._outcomes.forget(SaveId(ballot.step, self._generation), error)
        if self._group.rank != 0:
            self._outcomes.listener.tell(Voided(ballot.step, error))
        elif untold or not ballot.persists:  # else the committer has told it
            self._outcomes.listener.tell(Voided(ballot.step, error))
            log.warning("%s; the next save compares all of it, and says which tensors differ", error)
