"""The search of one restore for a step to go on from: where it looks, what it tries next, and what it has skipped."""

from __future__ import annotations

import logging

from ckptlib.errors import CkptError, ObjectUnreadable
from ckptlib.format.keys import SaveId
from ckptlib.loading.progress import Laps
from ckptlib.recovery.candidates import Candidate, Untried, newest_in_memory
from ckptlib.recovery.left_out import tell_left_out
from ckptlib.recovery.leftovers import await_writers, finish
from ckptlib.recovery.looking import look_at_disks, look_in_memory
from ckptlib.recovery.not_closed import await_others
from ckptlib.recovery.skipped import Skipped, problem
from ckptlib.recovery.store_check import check_store
from ckptlib.saving.session import Session

log = logging.getLogger(__name__)


class Search:
    """Finds one candidate after the other, newest first; the same on all ranks."""

    def __init__(self, session: Session, step: int | str | None) -> None:
        """Looks, once the job before has ended and what it left whole is committed. Collective.

        `step`: the only one that will do.
        """
        self._session, self._step = session, step
        self.skipped = Skipped()
        self.laps = Laps()
        """How long it took to look, to wait for writers, and to list."""
        await_others(session)
        self.inventory = look_in_memory(session)
        self.laps.end("look")
        await_writers(session, newest_in_memory(session, self.inventory) if step is None else None)
        self.laps.end("wait")
        self._finished_all = step is not None
        finish(session, self._finished_all)
        self.on_disks, self._in_part_on_disks = look_at_disks(session, step)
        self._untried, self._in_part = Untried(session, self.inventory, self.on_disks, step), self.inventory.in_part()
        self.laps.end("list")

    def take(self) -> Candidate | None:
        """Returns the next candidate; None if none is left."""
        return self._untried.take()

    def skip(self, candidate: Candidate, error: CkptError) -> None:
        """Notes that a candidate could not be used, and looks again: another job, or a writer that the job before left,
        may have dropped it, or committed a newer one. Collective. Raises if the store as a whole cannot be read."""
        session = self._session
        if isinstance(error, ObjectUnreadable):
            check_store(session)
        self.skipped.add(candidate, error)
        if candidate.snapshot is not None:  # nobody waited for its writers, some of which may yet have it to commit
            await_writers(session, self._untried.next)
            finish(session, self._finished_all)
            self.on_disks = look_at_disks(session, self._step).whole
        elif candidate.local is None and not self._finished_all:  # the step before it may be one that nobody committed
            self._finished_all = True
            finish(session, self._finished_all)
        self._untried.look_again(self.on_disks)
        if session.group.rank == 0:
            log.error(
                "step %s in %s %s and is skipped%s: %s",
                candidate.save,
                candidate.where,
                problem(error),
                ", the next is tried" if self._untried else "",
                error,
            )

    def safer(self, candidate: Candidate) -> SaveId | None:
        """See `candidates.safer_of`."""
        return self._untried.safer(candidate)

    def tell_left_out(self, restored: Candidate | None) -> None:
        """Warns of newer steps of which the hosts hold only a part. `restored`: None if no step was."""
        tell_left_out(self._session, self.inventory, self._in_part, self._in_part_on_disks, restored)
