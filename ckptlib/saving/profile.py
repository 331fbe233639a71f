"""What each step took, and what saves took of it: read off the clock for the tuner of one rank.

Whether a save was at work beside a step is what all ranks said, since one rank's writer slows the steps of all.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from ckptlib.policy.tuner import Iteration, Tuner


class Profile:
    """One per Checkpointer; main thread."""

    def __init__(self, tuner: Tuner) -> None:
        self.tuner = tuner
        self._ended: float | None = None
        """When the last `after_step` did; None before there was one."""
        self._fence_s = 0.0
        """Waited at the fence, all in all, by then."""
        self._waited_s = 0.0
        """For other ranks, in this `after_step`."""
        self._at_work = False
        """Whether a save was, on some rank, as this step began."""
        self._saved = False
        """Whether one began at the end of this step."""
        self._under_way: dict[str, float] = {}
        """Saves of this rank that are being written, and since when."""
        self._written = 0.0
        """When the last one was."""

    @contextmanager
    def step(self, fence_s: float) -> Iterator[None]:
        """Around `after_step`. `fence_s`: seconds waited at the fence since the Checkpointer was made."""
        began, self._waited_s, self._saved = time.perf_counter(), 0.0, False
        yield
        ended = time.perf_counter()
        if self._ended is not None:
            ours_s = ended - began - self._waited_s + fence_s - self._fence_s
            self.tuner.note(Iteration(ended - self._ended, ours_s, self._at_work, self._saved))
        self._ended, self._fence_s = ended, fence_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for other ranks: the training would wait for them, too, were nothing saved."""
        began = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - began

    def note_agreed(self, at_work: bool) -> None:
        """Whether a save was at work on some rank, as this step began."""
        self._at_work = at_work

    def note_saved(self) -> None:
        """A save began."""
        self._saved = True

    def note_under_way(self, saves: Collection[str]) -> None:
        """Which saves of this rank are being written."""
        now = time.perf_counter()
        for save in [save for save in self._under_way if save not in saves]:
            self.tuner.persisted(now - max(self._under_way.pop(save), self._written))
            self._written = now
        for save in saves:
            self._under_way.setdefault(save, now)
