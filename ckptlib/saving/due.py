"""The saves that a Checkpointer owes, and how earlier ones went: one rank's view, which the beat tells the others.

Pure: it knows neither ranks, nor tensors, nor the store.
"""

from __future__ import annotations

from ckptlib.policy.when import Policy
from ckptlib.saving.cadence import Cadence
from ckptlib.words import is_told


class DueSaves:
    """The due saves of one Checkpointer. A save stays due until it is taken, and falls due again if it comes to
    nothing."""

    def __init__(self, store: Policy, memory: Policy | None) -> None:
        """`store`: when to save to the store. `memory`: when to keep a snapshot in memory; None for never."""
        self.store = Cadence(store)
        self.memory = None if memory is None else Cadence(memory)
        self._step = 0
        """The last step that `look_ahead` was told of."""
        self._now = 0.0
        """The time at which it was told."""
        self._last_due: int | None = None
        """The last step at which the policy found a save due; before the first, the step at which this began."""
        self._interval: int | None = None
        """The number of steps between the last two of these."""
        self._waits_since = 0
        """The step at which the save that is due now fell due."""
        self._is_late = False
        """Whether the last save waited two intervals or longer, or the one that is due does."""
        self.num_late = 0
        """How often that has happened so far; several late saves in a row count once."""
        self.final: int | None = None
        """The last step of the loop, which is always saved; None if not known."""
        self.to_store = False
        """Whether a save to the store is due."""
        self.in_memory = False
        """Whether a snapshot is due, at least for memory."""
        self.inline = False
        """Whether the next snapshot is copied without overlap, because one was torn."""
        self.failures = 0
        """How many saves in a row failed on this rank before the writer had them."""
        self.error: Exception | None = None
        """Why the last of these failed."""

    def look_ahead(self, step: int, now: float = 0.0) -> None:
        """Prepares for `step`, which comes next. `now`: seconds, by a clock that never goes back."""
        self._step, self._now = step, now
        if self._last_due is None:
            self._last_due = step - 1
        if not self.to_store and self.store.is_due(step, now):
            self._interval, self._last_due = step - self._last_due, step
            self._fall_due()
        if step == self.final:
            self._fall_due()
        if not self.in_memory and self.memory is not None:
            self.in_memory = self.memory.is_due(step, now)

    def _fall_due(self) -> None:
        if not self.to_store:
            self.to_store, self._waits_since = True, self._step

    @property
    def _waits_long(self) -> bool:
        """Whether a save has been due for two intervals or longer."""
        waited = self._step - self._waits_since
        return self.to_store and self._interval is not None and waited >= 2 * self._interval

    def must_tell(self) -> bool:
        """Returns whether to warn that a save has been due for two intervals: once, until a save is taken in time. Of
        all such times, it reports the first, second, fourth and so on: a store that is a little too slow makes every
        other save late."""
        if self._is_late or not self._waits_long:
            return False
        self._is_late = True
        self.num_late += 1
        return is_told(self.num_late)

    def begin(self, to_store: bool) -> None:
        """Notes that a snapshot is taken now: the saves that it serves are no longer due."""
        self.skip(to_store)
        self.inline = self.inline and self.to_store  # a save that waits may be the one that was torn

    def skip(self, to_store: bool) -> None:
        """Notes that this step is saved already."""
        if to_store:
            self.store.note(self._step, self._now)
        if self.memory is not None:
            self.memory.note(self._step, self._now)
        if self.to_store and to_store:
            self._is_late = self._is_late and self._waits_long
        self.to_store = self.to_store and not to_store
        self.in_memory = False

    def owe(self, to_store: bool, inline: bool = False) -> None:
        """Makes another snapshot due as soon as possible, because one came to nothing."""
        if to_store:
            self._fall_due()
        self.in_memory = True
        self.inline = self.inline or inline

    def succeed(self) -> None:
        """Notes that the writer will have the save that was begun."""
        self.failures, self.error = 0, None

    def fail(self, error: Exception) -> None:
        """Notes that a save failed on this rank."""
        self.failures += 1
        self.error = error
