"""A save in flight, for callers that wait for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

from ckptlib.errors import SaveFailed
from ckptlib.format.keys import SaveId
from ckptlib.policy import stop_signal
from ckptlib.ranks.group import Group
from ckptlib.saving.outcome import Outcome, Outcomes
from ckptlib.staging.stager import Staging


class Pending:
    """A snapshot in flight, and the save that is made of it."""

    def __init__(
        self,
        outcomes: Outcomes,
        group: Group,
        save: SaveId,
        staging: Staging,
        persists: bool,
        deadline_s: float,
        drains: bool = True,
    ) -> None:
        self.group = group
        self.save = save
        self.staging = staging
        self.persists = persists
        """Whether it is saved; if not, it is for memory only, and never committed."""
        self.drains = drains
        """Whether it goes to the store; with a local tier, some saves stay on local disks, and are never committed."""
        self._outcomes = outcomes
        self._outcome = Outcome(save)
        self._deadline_s = deadline_s
        if persists:
            outcomes.expect(self._outcome)

    def drain(self) -> None:
        """Sends the save to the store after all. All ranks call this, once the save is on the disks of all."""
        self.drains = True
        self._outcomes.drain(self._outcome)

    @property
    def step(self) -> int:
        return self.save.step

    @property
    def committed(self) -> bool:
        """Whether the step is known to exist. On ranks other than 0 only after `wait_committed`."""
        return self._outcome.committed

    @property
    def error(self) -> Exception | None:
        """Why the step will never exist."""
        return self._outcome.error

    # The words of concurrent.futures

    def result(self, timeout: float | timedelta | None = None) -> int:
        """Returns the step, once it exists and is durable. Waits and raises as `wait_committed` does."""
        self.wait_committed(timeout)
        return self.step

    def done(self) -> bool:
        """Returns whether `result` would return, or raise, at once. Waits for nothing; any rank may ask alone."""
        known = self._outcomes.is_known(self._outcome, self.staging)
        self._outcomes.listener.deliver()
        return known or not self.drains

    def add_done_callback(self, function: Callable[[Pending], object]) -> None:
        """Has `function` called with this object, once, when this rank knows that the step is committed, or never will
        be.

        As with `Checkpointer(on_event=)`, the thread that trains calls it, or one that waits for a save: at the end of
        an `after_step`, a save, a wait, `done` or `close`; at once if the outcome is known. What it raises is logged.
        It is not called if the process ends before this rank knows, nor for a save that stays on local disks.
        """
        self._outcomes.call_back(self._outcome, partial(function, self), self.drains)
        self._outcomes.listener.deliver()

    # Waiting

    def wait_staged(self, timeout: float | timedelta | None = None) -> None:
        """Returns when the snapshot is whole in memory that outlives this process.

        Raises WaitTimeout after `timeout`, or the error that made the snapshot fail.
        """
        timeout_s = None if timeout is None else _seconds(timeout)
        self._wait(lambda: self._outcomes.wait_staged(self.staging, timeout_s))

    def wait_released(self, timeout: float | timedelta | None = None) -> None:
        """Returns when this rank's part is durable, or failed, and its slot is free.

        Raises SaveFailed if there is no snapshot of it, and WaitTimeout.
        """
        timeout_s = self._patience_s(timeout)
        self._wait(lambda: self._outcomes.wait_released(self._outcome, self.staging, timeout_s))

    def wait_local(self, timeout: float | timedelta | None = None) -> None:
        """With a local tier: returns when this rank's share is durable on its host's disk. Any rank may ask alone.

        The step can be restored from local disks when that is so on all ranks. Without one, returns when this rank's
        part is durable in the store. Raises as `wait_committed` does.
        """
        timeout_s = self._patience_s(timeout)
        self._wait(lambda: self._outcomes.wait_local(self._outcome, self.staging, timeout_s))

    def wait_committed(self, timeout: float | timedelta | None = None) -> None:
        """Returns when the step exists and is durable. Any rank may ask alone.

        Raises SaveFailed when it never will; WaitTimeout after `timeout` (seconds or a timedelta; default: the save's
        deadline), and at once if the Checkpointer is closed and this rank has not heard what became of the save.
        """
        if not self.drains:
            raise SaveFailed(
                f"step {self.step} stays on local disks and is never committed, since no drain was due, or too much "
                "was to be drained already (drain=); wait for it with wait_local, or call save for a step that must be "
                "in the store"
            )
        timeout_s = self._patience_s(timeout)
        self._wait(lambda: self._outcomes.wait_committed(self._outcome, self.staging, timeout_s))

    def _patience_s(self, timeout: float | timedelta | None) -> float:
        """Returns how long to wait; None: as long as a save may take."""
        return self._deadline_s if timeout is None else _seconds(timeout)

    def _wait(self, wait: Callable[[], None]) -> None:
        """Waits, then runs callbacks: training stands still anyway."""
        try:
            with stop_signal.waiting(self._ends):
                wait()
        finally:
            self._outcomes.listener.deliver()

    def _ends(self) -> bool:
        """Returns whether the wait ends by itself, not held up by a device: a copy queued after a collective with a
        rank that died never ends. Any thread."""
        try:
            return self.staging.done or all(copies.read for copies in self.staging.device_copies)
        except RuntimeError:  # the device has failed
            return False


def _seconds(timeout: float | timedelta) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
