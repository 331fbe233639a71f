"""Decides when one kind of save falls due, to the store or in memory: a policy, and its measurements. Pure."""

from __future__ import annotations

from ckptlib.policy.when import Moment, Policy


class Cadence:
    """Tracks one kind of save; the same on all ranks, but for their clocks."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._saved: int | None = None
        """The step of the last save; before the first, the step at which this began."""
        self._saved_at = 0.0
        self._is_first = True
        self.agreed: int | None = None
        """The number of steps between saves that all ranks have agreed on, if one of them keeps to an overhead."""
        self._widened = False
        """Whether all ranks have agreed that the next save waits for a baseline."""

    def agree(self, interval: int, widened: bool) -> None:
        """Takes the interval that all ranks agreed on. It is in force from the next step on, on every rank."""
        self.agreed = interval or None
        self._widened = widened

    def is_due(self, step: int, now: float) -> bool:
        """Returns whether the policy wants the state after `step`, which comes next. `now`: seconds."""
        if self._saved is None:
            self._saved, self._saved_at = step - 1, now
        interval = None if self._widened else self.agreed
        return self._policy.due_at(Moment(step, self._saved, now, self._saved_at, self._is_first, interval))

    def note(self, step: int, now: float) -> None:
        """Notes that the state after `step` is saved."""
        self._saved, self._saved_at, self._is_first = step, now, False
