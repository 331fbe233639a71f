"""Snapshots of the job as all ranks begin them, and what became of each at the holders of its replicas."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from ckptlib.format.keys import SaveId
from ckptlib.peers.increment_sender import StepSender


@dataclass(frozen=True, slots=True)
class Round:
    """One snapshot of the job, as all ranks know it when they begin it."""

    root_id: str
    save: SaveId
    number: int
    """See `SlotHeader.number`."""
    held_by_all: int
    """The step that all ranks hold: its replica stays, and those of later steps."""
    settled: int
    """Replicas of steps after `held_by_all` and up to this one may go: they failed on some rank, or are older than one
    that counts once the generation has its record."""
    void: frozenset[int] = frozenset()
    """Steps after `held_by_all` whose snapshots were found to differ between ranks, and may go."""

    def may_go(self, step: int) -> bool:
        """Returns whether the slots of this step may be overwritten at any time: then nothing may build on it."""
        return step in self.void or self.held_by_all < step <= self.settled


class ReplicaOutcome:
    """The outcome of one snapshot at its holders."""

    def __init__(self, num_holders: int) -> None:
        self._left = num_holders
        self._lock = threading.Lock()
        self.sent = 0
        """Bytes that were sent of its body, or in their place."""
        self.coded = 0
        """Bytes of it that went as increments, before they were coded."""
        self.uncoded: Counter[str] = Counter()
        """Bytes that did not go as increments, by reason."""
        self.failed = False
        """Whether a holder has no replica. That all have one can be said only when it is settled."""

    def note(self, sealed: bool, sent: int = 0, steps: StepSender | None = None) -> None:
        """Notes the outcome at one holder. `steps`: how it went there, if increments may be sent."""
        with self._lock:
            self._left -= 1
            self.sent += sent
            if sealed and steps is not None:
                self.coded += steps.coded
                self.uncoded.update(steps.left)
            self.failed = self.failed or not sealed

    @property
    def settled(self) -> bool:
        return self._left == 0
