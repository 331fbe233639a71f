"""The steps that a restore has skipped, and the error if no other one is left. Pure."""

from __future__ import annotations

from ckptlib.errors import CheckpointNotFound, CkptError, CorruptData, NewerFormat, ObjectNotFound, ObjectUnreadable
from ckptlib.recovery.candidates import Candidate

LACKS = "lacks an object"


def problem(error: CkptError) -> str:
    """Says what is wrong with a step that is skipped."""
    if isinstance(error, NewerFormat):
        return "is of a newer format"
    if isinstance(error, (CheckpointNotFound, ObjectNotFound)):
        return LACKS
    return "cannot be read" if isinstance(error, ObjectUnreadable) else "is damaged"


class Skipped:
    """The skipped steps of one restore; the same on all ranks."""

    def __init__(self) -> None:
        self.told: list[str] = []
        """Each step, with its problem."""
        self._lost: type[CkptError] = CorruptData
        self._newer, self._absent, self._in_memory = False, True, True

    def add(self, candidate: Candidate, error: CkptError) -> None:
        """Adds a candidate that could not be used."""
        self.told.append(f"step {candidate.save} in {candidate.where}: {error}")
        self._newer = self._newer or isinstance(error, NewerFormat)
        self._absent = self._absent and problem(error) == LACKS
        self._in_memory = self._in_memory and candidate.snapshot is not None
        if isinstance(error, ObjectUnreadable):
            self._lost = ObjectUnreadable

    def error_of(self, step: int | str, url: str) -> CkptError:
        """Returns the error if nothing but this step would do."""
        what = "is of a newer format" if self._newer else "is not whole" if self._absent else "is damaged"
        kind = NewerFormat if self._newer else CheckpointNotFound if self._absent else self._lost
        return kind(
            f"{url}: step {step} {what}, so the job does not go back to it, and no step is abandoned. Try another one, "
            f"as ckptlib ls lists them: {'; '.join(self.told)}"
        )

    def error(self, url: str) -> CkptError:
        """Returns the error if any step would do, and there are some."""
        why = "; ".join(self.told)
        if self._newer:
            return NewerFormat(f"{url}: this ckptlib is too old to read any step; upgrade it: {why}")
        if self._absent and self._in_memory:
            return CheckpointNotFound(
                f"{url}: nothing is damaged, but each step was in memory alone, and the job before let go of it as it "
                f"was read. Start this job again: {why}"
            )
        if self._absent:
            return CheckpointNotFound(
                f"{url}: nothing is damaged, but every step lacks objects. Was all of the root copied here, and has "
                f"the copy ended? {why}"
            )
        if self._lost is ObjectUnreadable:
            return ObjectUnreadable(f"{url}: no step can be read: {why}")
        anew = f"`ckptlib slots {url} --clean` on each host" if self._in_memory else "another root"
        return CorruptData(
            f"{url}: every step is damaged: {why}. Nothing was restored, and nothing is deleted: each start of this "
            f"job ends here. Put back a copy of the root, if there is one; to begin anew, {anew}"
        )
