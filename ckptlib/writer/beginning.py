"""Begins the trainer's generation: each writer takes its parent from the resumed step, and rank 0's puts the record.

No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ckptlib.catalog.begun import Begun
from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CkptError, describe
from ckptlib.format.keys import SaveId
from ckptlib.writer.begin_order import BeginOrder
from ckptlib.writer.channel import Channel
from ckptlib.writer.generation import GenerationRecord
from ckptlib.writer.known_origin import KnownOrigin, borrowed
from ckptlib.writer.trainer import Trainer
from ckptlib.writer.watchdog import Watchdog


class Beginning:
    """Carries out the trainer's order that its generation begins. One per writer."""

    def __init__(
        self,
        channel: Channel,
        trainer: Trainer,
        watchdog: Watchdog,
        catalog: Catalog,
        go_on_from: Callable[[SaveId, KnownOrigin | None], None],
    ) -> None:
        self._channel, self._trainer, self._watchdog = channel, trainer, watchdog
        self._catalog, self._go_on_from = catalog, go_on_from
        self._record: GenerationRecord | None = None

    @property
    def owes_record(self) -> bool:
        return self._record is not None and not self._record.is_put

    def begin(self, order: BeginOrder, known: str | None, rank: int) -> Begun | None:
        """Begins the generation. It enters history with its first save: rank 0's writer puts its record before that.
        `known`: where the trainer lends what it knows of the step that it restored.

        Returns what is to be noted on a local disk; None if the record was put, or if another rank's writer puts it.
        """
        record, step = order.record, order.first_step
        if record.resumed_from is not None:
            self._go_on_from(record.resumed_from, borrowed(known))
        if rank != 0:
            return None
        self._record = GenerationRecord(record, order.root_id, step, order.continues, order.again, order.seen)
        if order.is_put:
            self._record.note_put(self._catalog)
        return None if self._record.is_put else Begun(record, step, order.continues, order.seen)

    def put_now(self) -> None:
        """Puts the record at once: snapshots in memory or on local disks are of no use before it is in the store."""
        try:
            with self._watchdog.work("begin", None, time.monotonic() + self._trainer.deadline_s):
                self.put()
        except (CkptError, OSError) as error:
            self._channel.send({"event": "not-begun", "kind": type(error).__name__, "error": describe(error)})

    def put(self) -> None:
        """Puts the record if it is still owed. Called by whichever thread uses the store for what is saved."""
        if self._record is None or self._record.is_put:
            return
        warning = self._record.put(self._catalog)
        if self._record.record.resumed_from is not None:
            self._go_on_from(self._record.record.resumed_from, None)
        record = self._record.record.encode().decode()
        self._channel.send({"event": "begun", "warning": warning, "record": record})
