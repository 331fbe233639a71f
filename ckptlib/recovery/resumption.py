"""What a Checkpointer asks for as its training resumes: the state and the random generators of the step to go on from.

Knows nothing of the steps that follow, except that the first of them ends the resumption.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from ckptlib.loading.report import LoadReport
from ckptlib.recovery.keeping import keep_restored
from ckptlib.recovery.restore import Scope, restore
from ckptlib.saving.attempts import Attempts
from ckptlib.saving.exports import Exports
from ckptlib.saving.session import Session
from ckptlib.saving.terminal import show
from ckptlib.saving.turns import Turns
from ckptlib.state.rng import LoadedRng

log = logging.getLogger(__name__)

Begin = Callable[[Mapping[str, object], bool, str | torch.device | None], LoadReport]
"""Fills the state from what a fresh run was told to begin from: strictly or not, on a device or where the state is."""


class Resumption:
    """The resumption of one Checkpointer; for the main thread."""

    def __init__(
        self,
        session: Session,
        state: Mapping[str, object],
        turns: Turns,
        attempts: Attempts,
        exports: Exports,
        begin: Begin | None,
    ) -> None:
        self._session = session
        self._state = state
        self._turns = turns
        self._attempts = attempts
        self._exports = exports
        self._begin = begin
        self._generators: LoadedRng | None = None
        """The generators of the restored step, until they are put back."""
        self._to_warm: int | None = None

    def install(self, nbytes: int) -> None:
        """Makes room for snapshots of a state of `nbytes` bytes."""
        self._to_warm = nbytes
        if self._session.settings.peers is None:
            self.warm()

    def warm(self) -> None:
        """Makes the slots in the background; with peers, not before `restore` has looked at those of the job before."""
        if self._to_warm is not None:
            self._session.snapshots.arena.warm(self._to_warm)
            self._to_warm = None

    def restore(
        self,
        step: int | str | None,
        scope: Scope,
        strict: bool,
        device: str | torch.device | None,
        has_saved: bool,
    ) -> LoadReport:
        """See `Checkpointer.restore`. `has_saved`: whether `save` has taken a step."""
        self._check_first(has_saved)
        session, rank = self._session, self._session.group.rank
        filled, safer = restore(session, self._state, strict, device, step, scope)
        report, self._generators, marks = filled
        session.writer.wake()
        if report.save is None and self._begin is not None:
            report = self._begin(self._state, strict, device)
        if report.save is not None:
            self._turns.tuning.remember(report.save)
        if rank == 0:
            show(log, "restore: %s", report)
        if session.settings.peers is not None:
            session.snapshots.keep_before(report.save, safer)
            if safer is not None:
                self._to_warm = None  # else this rank's own slots might take its room before it has another copy
            self.warm()
        if scope.only is not None and report.save is not None and rank == 0:
            log.warning(
                "restore(only=%r): all else of the state, and the random generators, are left as they were, by every "
                "restart of a program that says so. To begin from another run, ckptlib.load(url, state, only=...)",
                scope.only,
            )
        if scope.only is None:  # on all ranks
            generators = self._generators
            self._attempts.last = keep_restored(session, self._state, report, marks, generators, self._attempts)
        self._exports.note_restored(report.save, report.committed, self._attempts.last)
        session.listener.deliver()
        return report

    def _check_first(self, has_saved: bool) -> None:
        if self._turns.started:  # what was agreed for the next step would be met by another one
            raise ValueError("call restore before the first after_step; to go back, create another Checkpointer")
        if has_saved:  # and what is restored would be under numbers that are taken
            raise ValueError(
                "call restore before the first save; to go back to what was saved, close this Checkpointer, and create "
                "another one"
            )
        if (kept := self._attempts.last) is not None:  # it may be written still, and would be followed by itself
            raise ValueError(
                f"call restore once: it has saved step {kept.step} again, which the store lacked. The state is that of "
                "this step; to go back, close this Checkpointer, and create another one"
            )

    def put_back_random(self) -> None:
        """Puts the random generators back to where they were, once."""
        generators, self._generators = self._generators, None
        if generators is not None:
            generators.restore()

    def end(self) -> None:
        """Ends the resumption: the first step is done, whether the job has restored or not."""
        self._generators = None  # too late for them
        self.warm()
