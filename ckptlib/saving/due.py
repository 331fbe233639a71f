"""The saves that a Checkpointer owes, and how earlier ones went: one rank's view, told to the others by the beat.

Pure: it knows neither ranks, nor tensors, nor the store.
"""

from __future__ import annotations

from ckptlib.policy.when import Policy
from ckptlib.saving.cadence import Cadence
from ckptlib.words import is_told


class DueSaves:
    """One per Checkpointer. A save that is due stays due until it is taken, and again if it comes to nothing."""

    def __init__(self, store: Policy, memory: Policy | None) -> None:
        """When to save to the store, and when to keep a snapshot in memory; None: never."""
        self.store = Cadence(store)
        self.memory = None if memory is None else Cadence(memory)
        self._step = 0
        """The last that was looked ahead to."""
        self._now = 0.0
        """When it was."""
        self._last_due: int | None = None
        """Where the policy said so for the last time; before it has, where this began."""
        self._interval: int | None = None
        """Steps from there back to the time before."""
        self._waits_since = 0
        """The step at which the due save fell due."""
        self._is_late = False
        """Whether the last save waited so long, or the one that is due does."""
        self.num_late = 0
        """How often that has come so far; several in a row are one."""
        self.final: int | None = None
        """The last step of the loop, which is always saved; None: not known."""
        self.to_store = False
        """Whether a save is due."""
        self.in_memory = False
        """Whether a snapshot is due, for memory at least."""
        self.inline = False
        """Whether the next snapshot is copied without overlap, since one was torn."""
        self.failures = 0
        """Saves in a row that failed on this rank before the writer had them."""
        self.error: Exception | None = None
        """Why the last of these did."""

    def look_ahead(self, step: int, now: float = 0.0) -> None:
        """`step` comes next. `now`: seconds, by a clock that only goes forward."""
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
        """Whether a save has been due for two intervals by now."""
        waited = self._step - self._waits_since
        return self.to_store and self._interval is not None and waited >= 2 * self._interval

    def must_tell(self) -> bool:
        """Whether a save waits so long; says so once, until one is taken in time; and not of every time, but the first,
        the second, the fourth and so on: a store that is a little too slow makes every other save late."""
        if self._is_late or not self._waits_long:
            return False
        self._is_late = True
        self.num_late += 1
        return is_told(self.num_late)

    def begin(self, to_store: bool) -> None:
        """A snapshot is taken now: the saves that it serves are due no longer."""
        self.skip(to_store)
        self.inline = self.inline and self.to_store  # a save that waits may be the one that was torn

    def skip(self, to_store: bool) -> None:
        """This step is saved already."""
        if to_store:
            self.store.note(self._step, self._now)
        if self.memory is not None:
            self.memory.note(self._step, self._now)
        if self.to_store and to_store:
            self._is_late = self._is_late and self._waits_long
        self.to_store = self.to_store and not to_store
        self.in_memory = False

    def owe(self, to_store: bool, inline: bool = False) -> None:
        """A snapshot came to nothing: another one is due as soon as can be."""
        if to_store:
            self._fall_due()
        self.in_memory = True
        self.inline = self.inline or inline

    def succeed(self) -> None:
        """The writer will have the save that was begun."""
        self.failures, self.error = 0, None

    def fail(self, error: Exception) -> None:
        """A save failed on this rank."""
        self.failures += 1
        self.error = error
