"""The store, as this rank's writer reports it: whether it has the generation's record, or a newer job's, and which
request it does not answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from ckptlib.errors import Superseded
from ckptlib.format import keys
from ckptlib.saving.lineage import Lineage
from ckptlib.saving.snapshots import Snapshots
from ckptlib.writer.client import Writer

log = logging.getLogger(__name__)

TELL_OF_IT = ("ready", "waiting", "begun", "not-begun", "swept", "warned")
"""The writer's events that end no save."""


class StoreState:
    """The store's state as one rank knows it; the caller takes in what the writer says."""

    def __init__(self, writer: Writer, snapshots: Snapshots, lineage: Lineage, size: int) -> None:
        """`size`: the number of ranks that save together."""
        self._writer, self._snapshots, self._lineage, self._size = writer, snapshots, lineage, size
        self._told_waiting: str | None = None
        """The save whose wait was logged last."""
        self._told_unrecorded = False
        self.superseded: Superseded | None = None
        """Why this job may save no more: a newer one has begun. None if it may."""

    def note(self, event: Mapping[str, object]) -> None:
        """Takes in one of the events in `TELL_OF_IT`."""
        kind = event["event"]
        if kind == "begun":
            self._lineage.note_recorded()
            self._told_unrecorded = False
            if event["warning"] is not None:
                log.warning("%s", event["warning"])
        elif kind == "not-begun":
            self._lineage.note_not_recorded()
            if event.get("kind") == Superseded.__name__:
                self.superseded = Superseded(str(event["error"]))
            elif not self._told_unrecorded:
                self._told_unrecorded = True
                log.error(
                    "the record of generation %s is not in the store; before it is, no snapshot in memory counts as "
                    "held; said once, until it is: %s",
                    self._lineage.generation,
                    event["error"],
                )
        elif kind == "waiting" and event["request"] is not None and event["save"] != self._told_waiting:
            self._told_waiting = None if event["save"] is None else str(event["save"])
            log.warning("%s; training goes on", self.waits_for())

    def waits_for(self) -> str:
        """Returns the reason why this rank's slots are busy, for messages."""
        waiting, steps = self._writer.waiting, [keys.parse_save(save).step for save in self._snapshots.persisting_saves]
        at = "nothing of this rank is being written, so it waits for other ranks"
        if self._size == 1:
            at = "what was taken is written, but for its commit"
        if steps:
            at = f"step {', then '.join(map(str, steps))} is being written"
        if waiting is None:
            return at
        seconds = time.monotonic() - waiting["since"]
        return f"{at}; the store has not answered {waiting['request']} for {seconds:.0f} s"
