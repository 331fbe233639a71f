"""What a Checkpointer has yet to save, and how its saves have gone: one rank's view, told to the others by the beat.

Pure: it knows neither ranks, nor tensors, nor the store.
"""

from __future__ import annotations

from ckptlib.policy.when import Moment, Policy


class DueSaves:
    """One per Checkpointer. A save that is due stays due until it is taken, and again if it comes to nothing."""

    def __init__(self, policy: Policy, every_in_memory: int | None) -> None:
        """`every_in_memory`: snapshots for memory are due at multiples of it; None: never."""
        self._policy = policy
        self._every_in_memory = every_in_memory
        self._step = 0
        """The last that was looked ahead to."""
        self._now = 0.0
        """When it was."""
        self._saved: int | None = None
        """The step of the last save; before there is one, where this began."""
        self._saved_at = 0.0
        self._is_first = True
        self.agreed: int | None = None
        """Steps between saves that all ranks have agreed upon, where one of them keeps to an overhead."""
        self._widened = False
        """Whether all ranks have agreed that the next save waits for a baseline."""
        self._last_due: int | None = None
        """Where the policy said so for the last time; before it has, where this began."""
        self._interval: int | None = None
        """Steps from there back to the time before."""
        self._waits_since = 0
        """Where what is due fell due."""
        self._told_waiting = False
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

    def agree(self, interval: int, widened: bool) -> None:
        """What all ranks said of their overhead: from the next step on it is in force, on all of them alike."""
        self.agreed = interval or None
        self._widened = widened

    def look_ahead(self, step: int, now: float = 0.0) -> None:
        """`step` comes next. `now`: seconds, by a clock that only goes forward."""
        self._step, self._now = step, now
        if self._last_due is None or self._saved is None:
            self._last_due = self._saved = step - 1
            self._saved_at = now
        interval = None if self._widened else self.agreed
        moment = Moment(step, self._saved, now, self._saved_at, self._is_first, interval)
        if not self.to_store and self._policy.due_at(moment):
            self._interval, self._last_due = step - self._last_due, step
            self._fall_due()
        if step == self.final:
            self._fall_due()
        every = self._every_in_memory
        self.in_memory = self.in_memory or (every is not None and step % every == 0)

    def _fall_due(self) -> None:
        if not self.to_store:
            self.to_store, self._waits_since = True, self._step

    @property
    def _waits_long(self) -> bool:
        """Whether a save has been due for two intervals by now."""
        waited = self._step - self._waits_since
        return self.to_store and self._interval is not None and waited >= 2 * self._interval

    def must_tell(self) -> bool:
        """Whether a save waits so long; says so once, until one is taken in time."""
        told, self._told_waiting = self._told_waiting, self._told_waiting or self._waits_long
        return self._waits_long and not told

    def begin(self, to_store: bool) -> None:
        """A snapshot is taken now: what it serves is due no longer."""
        self.skip(to_store)
        self.inline = False

    def skip(self, to_store: bool) -> None:
        """This step is saved already."""
        if to_store:
            self._saved, self._saved_at, self._is_first = self._step, self._now, False
        if self.to_store and to_store:
            self._told_waiting = self._told_waiting and self._waits_long
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
