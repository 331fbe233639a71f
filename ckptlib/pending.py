"""A save under way, for whoever waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptlib.group import Group
from ckptlib.keys import SaveId
from ckptlib.stage import Staging

if TYPE_CHECKING:
    from ckptlib.session import Session  # which makes these, and does the waiting


class Pending:
    """A snapshot under way, and the save that is made of it."""

    def __init__(self, session: Session, save: SaveId, staging: Staging, persists: bool) -> None:
        self.save = save
        self.persists = persists
        """Whether it goes to the store; else it is for memory only, and never committed."""
        self._session = session
        self._staging = staging
        self.committed = False
        """Whether the step is known to exist. On ranks other than 0 only after `wait_committed`."""
        self.error: Exception | None = None
        """Why it never will."""
        self.watches = 0
        """How often a rank that does not commit has asked what becomes of it, and was not answered yet."""

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def group(self) -> Group:
        return self._session.group

    @property
    def staging(self) -> Staging:
        return self._staging

    def wait_staged(self, timeout: float | None = None) -> None:
        """Returns when the snapshot is whole in memory that outlives this process.

        Raises WaitTimeout after `timeout` seconds, or what made the snapshot fail.
        """
        self._session.owner.check()
        self._staging.wait_sealed(timeout)

    def wait_released(self, timeout: float | None = None) -> None:
        """Returns when this rank's part is durable, or failed, and its slot is free. Raises as `wait_staged` does."""
        self._session.wait_released(self, timeout)

    def wait_committed(self, timeout: float | None = None) -> None:
        """Returns when the step exists and is durable. Any rank may ask alone.

        Raises SaveFailed when it never will; WaitTimeout after `timeout` seconds (default: the save's deadline).
        """
        self._session.wait_committed(self, timeout)
