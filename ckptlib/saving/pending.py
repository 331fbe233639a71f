"""A save under way, for whoever waits for it."""

from __future__ import annotations

from ckptlib.format.keys import SaveId
from ckptlib.ranks.group import Group
from ckptlib.saving.outcome import Outcome, Outcomes
from ckptlib.staging.stager import Staging


class Pending:
    """A snapshot under way, and the save that is made of it."""

    def __init__(
        self, outcomes: Outcomes, group: Group, save: SaveId, staging: Staging, persists: bool, deadline_s: float
    ) -> None:
        self.group = group
        self.save = save
        self.staging = staging
        self.persists = persists
        """Whether it goes to the store; else it is for memory only, and never committed."""
        self._outcomes = outcomes
        self._outcome = Outcome(save)
        self._deadline_s = deadline_s
        if persists:
            outcomes.expect(self._outcome)

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def committed(self) -> bool:
        """Whether the step is known to exist. On ranks other than 0 only after `wait_committed`."""
        return self._outcome.committed

    @property
    def error(self) -> Exception | None:
        """Why it never will."""
        return self._outcome.error

    def wait_staged(self, timeout: float | None = None) -> None:
        """Returns when the snapshot is whole in memory that outlives this process.

        Raises WaitTimeout after `timeout` seconds, or what made the snapshot fail.
        """
        self._outcomes.wait_staged(self.staging, timeout)

    def wait_released(self, timeout: float | None = None) -> None:
        """Returns when this rank's part is durable, or failed, and its slot is free. Raises as `wait_staged` does."""
        self._outcomes.wait_released(self._outcome, self.staging, self._deadline_s if timeout is None else timeout)

    def wait_committed(self, timeout: float | None = None) -> None:
        """Returns when the step exists and is durable. Any rank may ask alone.

        Raises SaveFailed when it never will; WaitTimeout after `timeout` seconds (default: the save's deadline).
        """
        self._outcomes.wait_committed(self._outcome, self.staging, self._deadline_s if timeout is None else timeout)
