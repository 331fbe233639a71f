"""Decides when a rank that does not commit asks the store for the outcome of a save. Pure.

Rank 0 leaves a notice as soon as it hears from its writer, which costs the store nothing. A rank asks the store in case
rank 0 is in a long computation, or gone. All ranks may wait at once, and each request is paid for.
"""

from __future__ import annotations

import random

_random = random.SystemRandom()
"""Not the training's own generator, whose sequence must not change."""

LOCAL_EVERY_S, REMOTE_EVERY_S = 0.1, 2.0

RANKS = 40
"""If there are more ranks, each asks less often, so that all together ask a remote store at most 20 times per
second."""

JITTER = 0.25
"""By what fraction pauses vary, so that ranks that begin to wait together do not ask together."""


class Looks:
    """The times at which one waiting rank asks. All are seconds of one clock."""

    def __init__(self, now: float, timeout_s: float, num_ranks: int, is_local: bool) -> None:
        self._every_s = (LOCAL_EVERY_S if is_local else REMOTE_EVERY_S) * max(1.0, num_ranks / RANKS)
        self._next = now + min(self._pause_s(), timeout_s / 2)
        self._was_lost = False

    def due(self, now: float, lost: bool) -> bool:
        """Returns whether the store is to be asked now. `lost`: whether notices can no longer be found."""
        if lost and not self._was_lost:
            self._was_lost = True
            self._next = now
        if now < self._next:
            return False
        self._next = now + self._pause_s()
        return True

    def _pause_s(self) -> float:
        return self._every_s * _random.uniform(1 - JITTER, 1 + JITTER)
