"""This rank's share of each save: persisted from its slot, with a local tier drained from the disk, or given up.

`commits` handles what becomes of the save then, whose shares are those of all ranks. No torch.
"""

from __future__ import annotations

import logging
import time
from functools import partial

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.failed_parts import raise_if_failed
from ckptlib.errors import CkptError, FormatError, StoreFull, describe
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.slots.slot import Slot
from ckptlib.writer.beginning import Beginning
from ckptlib.writer.channel import Channel
from ckptlib.writer.commits import Commits
from ckptlib.writer.failures import Failures
from ckptlib.writer.open_slots import OpenSlots
from ckptlib.writer.persist import Persister
from ckptlib.writer.tier import Tier
from ckptlib.writer.trainer import Trainer
from ckptlib.writer.watchdog import Watchdog

log = logging.getLogger(__name__)


class OwnShares:
    """Persists, drains or gives up this rank's share of each save, in the thread that each order belongs to."""

    def __init__(
        self,
        channel: Channel,
        trainer: Trainer,
        watchdog: Watchdog,
        failures: Failures,
        catalog: Catalog,
        rank: int,
        slots: OpenSlots,
        beginning: Beginning,
        persister: Persister,
        tier: Tier | None,
        commits: Commits,
    ) -> None:
        """`persister`: persists to the disk if there is a local tier."""
        self._channel, self._trainer, self._watchdog, self._failures = channel, trainer, watchdog, failures
        self._catalog, self._rank = catalog, rank
        self._slots, self._beginning, self._persister = slots, beginning, persister
        self._tier, self._commits = tier, commits
        self.parts = persister.parts if tier is None else tier.parts
        """The parts of this rank in the store."""

    def persist(self, save: SaveId, path: str, drains: bool, puts_layout: bool, again: bool) -> None:
        """Persists a share, in the thread that persists. `path`: of the slot. `drains`, `puts_layout`: see
        `Writer.persist`. `again`: whether a writer that is gone may have done it, in part or all."""
        self._channel.send({"event": "persists", "save": str(save)})  # before anything of it can be put
        began = time.monotonic()
        deadline = began + self._trainer.deadline_s
        try:
            with self._watchdog.work("persist", save, deadline):
                part = self._persist_slot(save, path, drains, puts_layout, again, deadline)
        except (CkptError, OSError, ValueError) as error:
            self.fail(save, error, drains)
            self._channel.send({"event": "released", "save": str(save), "slot": path, "error": describe(error)})
            return
        nbytes, seconds = part.nbytes_put, time.monotonic() - began
        total = part.table.nbytes_data
        log.info("step %d: %d bytes persisted in %.3f s, for a share of %d bytes", save.step, nbytes, seconds, total)
        told = {"save": str(save), "slot": path, "error": None, "seconds": seconds, "nbytes": nbytes, "began": began}
        if self._tier is not None:
            told["drains"] = drains
        self._channel.send({"event": "released", **told})
        if self._tier is not None:
            if drains:
                self._tier.jobs.put(partial(self.drain, save, began, puts_layout))
        elif self._rank == 0:
            self._commits.put(save, began)

    def _persist_slot(
        self, save: SaveId, path: str, drains: bool, puts_layout: bool, again: bool, deadline: float
    ) -> Part:
        """Persists a slot. `again`: whether a writer that died may have put a part; on a disk that one is found."""
        if again and self._tier is None:
            self.parts.doubt(save)
        try:
            slot = self._slots.find(path)
        except FormatError as error:
            raise FormatError(f"the writer lacks the slot of step {save.step}: {error}") from error
        try:
            if self._tier is None:
                if again:
                    raise_if_failed(self._catalog, save)  # as the writer that died may have told
                self._beginning.put()
                part = self._persister.persist(slot, save, deadline, puts_layout=puts_layout)
                if again:
                    self._persister.search_again()
                return part
            self._tier.look_there()
            self._tier.make_room(save)
            try:
                return self._persist_on_disk(self._tier, slot, save, drains, deadline)
            except StoreFull as error:
                log.warning("step %d is written once more, with less beside it on the disk: %s", save.step, error)
                self._tier.make_room(save, least=True)
                return self._persist_on_disk(self._tier, slot, save, drains, deadline)
        finally:
            slot.unlock()

    def _persist_on_disk(self, tier: Tier, slot: Slot, save: SaveId, drains: bool, deadline: float) -> Part:
        tier.note_begun()
        there = tier.persisted(slot, save)
        if there is not None:
            return there
        tier.note_new(save)
        return self._persister.persist(slot, save, deadline, may_be_parent=drains)

    def drain(self, save: SaveId, began: float, puts_layout: bool = True, again: bool = False) -> None:
        """Drains a share, in the thread that drains. `began`: when it was to be drained, at the earliest, by the
        monotonic clock. `again`: whether an earlier writer may have drained it, and rank 0's may have committed it."""
        assert self._tier is not None
        asks = again or time.monotonic() > began + self._trainer.deadline_s

        def before() -> None:
            nonlocal asks
            if asks:
                raise_if_failed(self._catalog, save)  # as rank 0, or the writer that is gone, may have told
            asks = True  # in case the store fails now
            self._beginning.put()

        try:
            self._tier.drain(save, before, puts_layout)
        except (CkptError, OSError, ValueError) as error:
            self._tier.settle(save)
            may_be_put = self.parts.may_have_put(save)
            self._failures.give_up(save, error, again or (may_be_put and self._rank != 0), is_put=may_be_put)
            self._commits.forget(save, error)
            return
        self._channel.send({"event": "drained", "save": str(save)})
        if self._rank == 0:
            self._commits.put(save, time.monotonic(), again)
        else:
            self._tier.settle(save)

    def fail(self, save: SaveId, error: BaseException, drains: bool = True) -> None:
        """Gives up this rank's share, in the thread that persists: its part will not come.

        With a local tier that thread does not wait for the store, and nobody waits for what is not drained.
        """
        self._commits.forget(save, error if self._tier is None else None)
        if self._tier is None:
            may_be_put = self.parts.may_have_put(save)
            self._failures.give_up(save, error, may_be_put and self._rank != 0, is_put=may_be_put)
            return
        self._tier.settle(save)
        if drains:
            self._tier.jobs.put(partial(self._failures.publish, save, describe(error)))
        self._failures.report(save, error, in_doubt=self._persister.parts.may_have_put(save))
