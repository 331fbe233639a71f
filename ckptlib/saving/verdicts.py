"""Verdicts on snapshots that ranks did not compare beforehand: alike and kept, or differing and given up by all."""

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
    """One rank's verdicts; all ranks come to the same ones at the same step. Main thread."""

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
        """The number of the last save before which the ranks compared."""
        self._differing: list[Ballot] = []
        """Snapshots given up, and not taken by `take_differing` yet."""

    def compared(self, number: int) -> None:
        """Notes that all ranks compared their replicas before the save of this number."""
        self._compared = number

    def vote(self, save: SaveId, number: int, to_store: bool, staging: Staging | None, reading: Reading | None) -> None:
        """Has the ranks find out, with the next beats, whether this snapshot is alike. `staging`: None if it failed."""
        self._ballots.begin(Ballot(save.step, number, to_store, staging, reading))

    def poll(self) -> Poll:
        """Returns this rank's votes."""
        return self._ballots.poll()

    def conclude(self, poll: Poll, sums: Sequence[int]) -> None:
        """Acts on the verdicts. `sums`: the votes of this poll, added over all ranks."""
        for verdict in self._ballots.conclude(poll, sums):
            ballot = verdict.ballot
            if verdict.alike and ballot.reading is not None:
                self._planner.note_moved(ballot.reading.moved)
            if verdict.differs:
                self._give_up(ballot)

    def take_differing(self) -> list[Ballot]:
        """Returns the snapshots given up since the last call."""
        differing, self._differing = self._differing, []
        return differing

    def _give_up(self, ballot: Ballot) -> None:
        """Gives up a snapshot. The writers may still put their parts; nobody commits these."""
        self._snapshots.void(ballot.step)
        if ballot.persists:
            self._outcomes.tier.void(ballot.step)
        if ballot.number > self._compared:  # else the ranks have compared a later save
            self._planner.must_compare = True
            self._differing.append(ballot)
        error = ReplicasDiffer(
            f"step {ballot.step} is not kept: tensors that several ranks hold as replicas, and one writes for all, "
            "differ between ranks"
        )
        untold = self._outcomes.forget(SaveId(ballot.step, self._generation), error)
        if self._group.rank != 0:
            self._outcomes.listener.tell(Voided(ballot.step, error))
        elif untold or not ballot.persists:  # else the committer has reported it
            self._outcomes.listener.tell(Voided(ballot.step, error))
            log.warning("%s; the next save compares all of it, and says which tensors differ", error)
