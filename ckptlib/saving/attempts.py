"""Makes saves that are due, and notes what becomes of each on this rank: taken, owed once more, or failed.

The caller passes the function that saves; the writer's part of the outcome is in `outcome`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ckptlib.errors import AgreementFailed, CkptError, ReplicasDiffer, SaveFailed, StateChanged, StateError
from ckptlib.events import Begun, Failed, Torn, Voided
from ckptlib.saving.due import DueSaves
from ckptlib.saving.pending import Pending
from ckptlib.saving.session import Session

log = logging.getLogger(__name__)


class Attempts:
    """Makes the saves of one Checkpointer, the same ones on all ranks. Main thread."""

    def __init__(self, session: Session, due: DueSaves) -> None:
        self._session = session
        self._due = due
        self.last: Pending | None = None
        """The newest save that goes to the store or to local disks, as far as this rank could take it."""
        self._missed: tuple[int, Exception] | None = None

    @property
    def missed(self) -> tuple[int, Exception] | None:
        """The newest step whose save came to nothing, and why; None if that step or a later one was taken."""
        taken = self.last is not None and self._missed is not None and self.last.step >= self._missed[0]
        return None if taken else self._missed

    def has(self, step: int) -> bool:
        """Returns whether this step is saved already."""
        return self.last is not None and step == self.last.step

    def make(self, step: int, to_store: bool, take: Callable[[], Pending]) -> Pending | None:
        """Returns the save, whose copies the caller starts with `go`; None if it failed and training goes on.

        Raises, on all ranks, errors that no later save would mend.
        """
        self._due.begin(to_store)
        try:
            taken = take()
        except (ReplicasDiffer, StateChanged) as error:
            self.miss(step, to_store, error)
            self._due.owe(to_store)
            if isinstance(error, ReplicasDiffer):  # on all ranks alike: the next save compares again
                self._due.fail(error)
                log.error("step %d is not saved: %s", step, error)
            else:
                log.warning("step %d is not saved, the next one is: %s", step, error)
            self._session.listener.tell(Voided(step, error))
            return None
        except CkptError as error:
            if isinstance(error, (StateError, AgreementFailed)):
                self.miss(step, to_store, error)
                raise
            self._fail(step, to_store, error)
            return None
        except Exception as error:  # raised by this rank's state
            self.miss(step, to_store, error)
            raise
        if to_store:
            self._due.succeed()
            self.last = taken
        return taken

    def miss(self, step: int, to_store: bool, error: Exception) -> None:
        """Notes that a step was due to be saved, and is not."""
        if to_store:
            self._missed = step, error

    def _fail(self, step: int, to_store: bool, error: CkptError) -> None:
        self.miss(step, to_store, error)
        if not to_store:
            self._session.snapshots.tell_unkept(step, error)
            return
        self._due.fail(error)
        told = isinstance(error, SaveFailed)  # its message says so already
        log.error("%s", error if told else f"step {step} could not be saved: {error}")
        self._session.listener.tell(Failed(step, error, tier="store"))

    def owe_again(self) -> bool:
        """Owes another save for each snapshot that came to nothing. Returns whether the ranks must compare before
        it."""
        self._owe_torn()
        if names := self._session.snapshots.take_changed():
            self._session.planner.note_written(names)
        return self._owe_differing()

    def _owe_torn(self) -> None:
        """Owes a torn snapshot once more, without overlap."""
        torn = self._session.snapshots.take_torn()
        if torn is None or torn.staging is None or torn.staging.error is None:
            return
        later = "" if self._session.snapshots.overlap else "; so are all later ones, since one after the other was torn"
        log.warning("%s; another snapshot is taken as soon as possible, without overlap%s", torn.staging.error, later)
        self._session.listener.tell(Torn(torn.step, torn.staging.error))
        self._due.owe(torn.persists, inline=True)
        if self.last is not None and self.last.staging is torn.staging:
            self._missed, self.last = (torn.step, torn.staging.error), None

    def _owe_differing(self) -> bool:
        """Owes another save if a snapshot was found to differ between ranks. Returns whether any did: ranks compare
        before the next."""
        differing = self._session.verdicts.take_differing()
        for ballot in differing:
            self._due.owe(ballot.persists)
            if self.last is not None and self.last.staging is ballot.staging:  # else a later save of the step is good
                self._missed, self.last = (ballot.step, ReplicasDiffer("replicas differ between ranks")), None
        return bool(differing)


def begun(pending: Pending, since: float) -> Begun:
    """Returns the event of a snapshot that has begun. `since`: when training stopped for it, by `time.perf_counter`."""
    tier = "memory" if not pending.persists else "store" if pending.drains else "local"
    nbytes = pending.staging.content.header.body_nbytes
    return Begun(pending.step, nbytes, tier, time.perf_counter() - since)
