"""The end of a Checkpointer: what it waits for, and what it leaves to the writer, the exports and a restart."""

from __future__ import annotations

import time
from contextlib import ExitStack
from datetime import timedelta

from ckptlib.errors import SaveFailed
from ckptlib.format.manifest import MAX_DEADLINE_S
from ckptlib.saving.attempts import Attempts
from ckptlib.saving.exports import Exports
from ckptlib.saving.keeper import StateKeeper
from ckptlib.saving.session import Session
from ckptlib.saving.turns import Turns
from ckptlib.staging.fence import Fence

CLOSE_TIMEOUT = timedelta(minutes=30)
"""How long a normal exit waits for the last save to be committed."""


class Ending:
    """Closes one Checkpointer, or leaves it to its writer. Main thread."""

    def __init__(
        self, session: Session, turns: Turns, fence: Fence, keeper: StateKeeper, exports: Exports, attempts: Attempts
    ) -> None:
        self._session, self._turns, self._fence = session, turns, fence
        self._keeper, self._exports, self._attempts = keeper, exports, attempts

    def close(self, timeout: timedelta, stop_timeout_s: float | None, preempted: bool) -> None:
        """See `Checkpointer.close`. `stop_timeout_s`: set if the job was told to stop; it then waits no longer than
        this. `preempted`: it was told before its last step, so that is not exported, and it waits for no export."""
        if not isinstance(timeout, timedelta):
            raise TypeError(f"close(timeout={timeout!r}): expected timedelta, such as timedelta(minutes=30)")
        deadline = time.monotonic() + min(timeout.total_seconds(), stop_timeout_s or MAX_DEADLINE_S)
        with ExitStack() as telling:
            telling.callback(self._exports.let_go)  # reports steps that are not exported, whatever is raised
            self._close_session(deadline)
            if (missed := self._attempts.missed) is not None:
                step, why = missed
                raise SaveFailed(f"step {step} was to be saved and is not, nor is a later one: {why}") from why
            if not preempted:
                telling.pop_all()
                self._exports.finish(self._attempts.last, self._turns.due.final, deadline)

    def leave(self) -> None:
        """Ends without waiting: the writer has the slot, and finishes alone."""
        self._let_go(clean=False, timeout=timedelta(0))
        self._exports.let_go()

    def _close_session(self, deadline: float) -> None:
        # If the last save failed, snapshots in memory may be newer than all that is in the store.
        needed = self._session.settings.peers is not None
        clean = not needed or self._attempts.missed is None
        self._turns.stop.heed()
        try:
            last = self._attempts.last
            if last is not None and self._session.owner.here:
                wait = last.wait_committed if last.drains else last.wait_local
                wait(deadline - time.monotonic())
        except SaveFailed:
            clean = not needed
            raise
        except BaseException:  # WaitTimeout, Ctrl-C, or an error of the program's handler: the outcome is unknown
            clean = False
            raise
        finally:
            self._let_go(clean, timedelta(seconds=max(deadline - time.monotonic(), 0.0)))

    def _let_go(self, clean: bool, timeout: timedelta) -> None:
        self._turns.stop.heed()
        self._fence.remove()
        self._keeper.end()
        try:
            self._session.close(timeout, clean)
        finally:  # last: SIGTERM ends no process that waits above, even if another Checkpointer is open
            self._turns.close()
