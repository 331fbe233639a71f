"""Measures the time of each step, and the share that saves took of it, for the tuners of one rank.

All ranks tell whether a save was in flight during a step, since one rank's writer slows the steps of all.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Sequence

from ckptlib.policy.tuner import Iteration, Tuner


class Account:
    """The measurements of one kind of save, those to the store or those in memory, and the tuner of its interval."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        self._at_work = False
        """Whether a save was in flight on some rank as this step began."""
        self._saved = False
        """Whether a save began at the end of this step."""
        self._under_way: dict[Hashable, float] = {}
        """This rank's saves that have not ended, and since when."""
        self._ended = 0.0
        """When the last save ended."""

    def note_step(self, seconds: float, ours_s: float) -> None:
        """Notes the time of a step, and the share of it that `after_step` and the fence took."""
        self.tuner.note(Iteration(seconds, ours_s, self._at_work, self._saved))

    def note_agreed(self, at_work: bool) -> None:
        """Notes whether a save was in flight on some rank as this step began; `note_saved` tells if one begins at its
        end."""
        self._at_work, self._saved = at_work, False

    def note_saved(self) -> None:
        """Notes that a save began."""
        self._saved = True

    def note_under_way(self, saves: Collection[Hashable]) -> None:
        """Notes which saves of this rank are in flight."""
        now = time.perf_counter()
        for save in [save for save in self._under_way if save not in saves]:
            self.tuner.persisted(now - max(self._under_way.pop(save), self._ended))
            self._ended = now
        for save in saves:
            self._under_way.setdefault(save, now)


class Profile:
    """Measures the steps for one Checkpointer's accounts; main thread."""

    def __init__(self, accounts: Sequence[Account]) -> None:
        self._accounts = accounts
        self._ended: float | None = None
        """When the last `after_step` ended; None before the first."""
        self._fence_s = 0.0
        """Seconds waited at the fence in total, by then."""
        self._began = 0.0
        """When this `after_step` began."""
        self._waited_s = 0.0
        """Seconds that this `after_step` waited for other ranks."""

    def begin(self) -> None:
        """Notes that an `after_step` begins."""
        self._began, self._waited_s = time.perf_counter(), 0.0

    def note_wait(self, seconds: float) -> None:
        """Notes a wait for other ranks: training would wait for them even if nothing were saved."""
        self._waited_s += seconds

    def end(self, fence_s: float) -> None:
        """Notes that an `after_step` has ended without an error. `fence_s`: seconds waited at the fence until it began,
        since the Checkpointer was made."""
        ended = time.perf_counter()
        if self._ended is not None:
            ours_s = ended - self._began - self._waited_s + fence_s - self._fence_s
            for account in self._accounts:
                account.note_step(ended - self._ended, ours_s)
        self._ended, self._fence_s = ended, fence_s
