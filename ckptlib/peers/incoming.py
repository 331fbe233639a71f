"""The replicas that come to this rank from one of those whose snapshots it holds, and the slots for them.

What this rank has in its own share of the state, as with data parallelism, it copies itself; only the rest comes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

from ckptlib.errors import CkptError, CorruptData, FormatError, NoRoom
from ckptlib.format.body_layout import body_nbytes
from ckptlib.format.table import Table
from ckptlib.pages import round_up
from ckptlib.peers.increment_receiver import StepReceiver
from ckptlib.peers.ranges import ByteRange, Ranges, everything
from ckptlib.peers.rounds import Round
from ckptlib.peers.stream import Stream
from ckptlib.peers.transfer import receive_slot
from ckptlib.ranks.link import Link
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import SnapshotReader
from ckptlib.staging.arena import Arena
from ckptlib.staging.pair import CopySource
from ckptlib.staging.stager import CopyJob, Staging

log = logging.getLogger(__name__)

FindAlike = Callable[[int, Table], tuple[Sequence[CopySource], tuple[int, ...]] | None]
"""Takes a rank and the table of its last snapshot; returns the shards of it that this rank has, too, and their offsets
in the body."""


@dataclass(frozen=True, slots=True)
class _Filled:
    """A slot for a replica, into which this rank copies the shards that it has itself when its own snapshot is done."""

    copy: CopyJob
    staging: Staging
    table: str
    """Digest of the table by which it is filled."""

    @property
    def slot(self) -> Slot:
        return self.copy.slot

    def wait(self, timeout: timedelta) -> bool:
        """Waits for the copies; returns whether they are whole. Raises WaitTimeout."""
        self.staging.wait_done(timeout.total_seconds())
        return self.staging.error is None

    def is_of(self, offered: SlotHeader) -> bool:
        """Returns whether the offered snapshot lies in its slot as the one before did."""
        return offered.documents.get("table", (0, 0, ""))[2] == self.table

    def lacks(self, offered: SlotHeader) -> Ranges:
        """Returns the ranges of the offered snapshot that this rank has not copied itself, without padding."""
        there = [(o, round_up(o + s.tensor.nbytes)) for s, o in zip(self.copy.sources, self.copy.offsets, strict=True)]
        edges = [0, *(edge for span in sorted(there) for edge in span), offered.body_nbytes]
        return [ByteRange(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]


class _Arrival:
    """One snapshot that comes here: the slot for it, and which of its ranges are to be sent."""

    def __init__(
        self, origin: int, now: Round, twin: _Filled | None, timeout: timedelta, take: Callable[[int], Slot]
    ) -> None:
        self._origin, self._now, self._twin, self._timeout, self._take = origin, now, twin, timeout, take
        self.slot: Slot | None = None
        self.filled: _Filled | None = None
        """The twin, if its slot is the one that was taken, and its copies are of this snapshot."""
        self.out_of_step = False
        """Whether another snapshot was offered than all ranks have begun."""

    def take(self, offered: SlotHeader) -> Slot:
        """Returns a slot for the offered snapshot. Raises FormatError, NoRoom or WaitTimeout."""
        now, twin = self._now, self._twin
        if (offered.root_id, offered.save, offered.number) != (now.root_id, now.save, now.number):
            self.out_of_step = True
            raise FormatError(
                f"rank {self._origin} offers snapshot {offered.number} ({offered.save}) of {offered.root_id}, expected "
                f"{now.number} ({now.save}) of {now.root_id}"
            )
        if twin is not None and twin.wait(self._timeout) and twin.is_of(offered):
            self.filled = twin
        self.slot = self._take(offered.body_nbytes) if self.filled is None else self.filled.slot
        return self.slot

    def lacks(self, offered: SlotHeader) -> Ranges:
        """Returns the ranges of its body that are to be sent."""
        return everything(offered) if self.filled is None else self.filled.lacks(offered)


class Incoming:
    """The way of another rank's snapshots to this one, which holds them. For the main thread."""

    def __init__(
        self, origin: int, world_size: int, arena: Arena, timeout: timedelta, steps: StepReceiver | None
    ) -> None:
        """`arena`: for these replicas alone. `steps`: if increments may come."""
        self.stream = Stream(f"from-{origin}", f"replicas of rank {origin}")
        self.arena = arena
        self._origin, self._world_size = origin, world_size
        self._timeout = timeout
        self._steps = steps
        self._reader = SnapshotReader()
        self._is_unlike = False
        """Whether replicas come whole, since what this rank has of them was found to differ."""

    def local_replica(self, now: Round, find: FindAlike) -> CopyJob | None:
        """Returns a copy of those shards of the next replica that this rank has itself, into a slot for it."""
        # While the stream is busy, the arena and the reader are its own.
        if self.stream.thread.busy or self._is_unlike:
            return None
        table = self._reader.table(self._origin)
        alike = None if table is None else find(self._origin, table)
        if table is None or alike is None:
            return None
        nbytes = body_nbytes(table)
        try:
            slot = self._take(now, nbytes)
        except NoRoom:
            return None  # that is told when the snapshot comes
        size, sequence = self._world_size, 2 * now.number - 1
        header = SlotHeader(now.root_id, now.save, self._origin, size, now.number, sequence, nbytes, {})
        return CopyJob(slot, header, *alike)

    def receive(self, link: Link, now: Round, twin: CopyJob | None, staging: Staging | None) -> None:
        """Receives the snapshot that all ranks have begun. `twin`: what `local_replica` has returned for it, whose
        copies are made with those of `staging`."""
        filled: _Filled | None = None
        if twin is not None and staging is not None:
            table = self._reader.table(self._origin)
            assert table is not None
            filled = _Filled(twin, staging, table.digest)
        self.stream.put(link, self._receive, now, filled)

    def _receive(self, link: Link, now: Round, twin: _Filled | None) -> None:
        origin, steps = self._origin, self._steps
        arrival = _Arrival(origin, now, twin, self._timeout, partial(self._take, now))

        def on_sealed() -> None:
            assert arrival.slot is not None
            self.arena.mark_ready(arrival.slot, now.save.step)

        try:
            if steps is not None:
                steps.begin(now.may_go)
            receive_slot(link, origin, origin, arrival.take, self._reader, arrival.lacks, steps, on_sealed)
            self.stream.tell(now.save.step, None)
        except CkptError as error:
            self._distrust(error, arrival.filled is not None)
            if arrival.out_of_step:  # this rank would refuse each one that follows: all connect anew
                link.cut()
            self.stream.tell(now.save.step, error)
        finally:
            if twin is not None:
                twin.staging.wait_done(None)  # until then it is written to, and nobody else may have it
            for slot in self.arena.slots:  # not the twin's, which is gone if it was too small
                slot.unlock()

    def _distrust(self, error: CkptError, was_filled: bool) -> None:
        """Gives up, from here on, what may have made a replica come out wrong."""
        if isinstance(error, CorruptData) and was_filled:
            self._is_unlike = True
            log.error("replicas of rank %d are sent whole from here on; what this rank has differs", self._origin)
        if isinstance(error, (CorruptData, FormatError)) and self._steps is not None and self._steps.used:
            self._steps.distrusted = True
            log.error("snapshots of rank %d come without increments from here on; one came out wrong", self._origin)

    def _take(self, now: Round, nbytes: int) -> Slot:
        """Returns a slot for a replica. Raises NoRoom."""
        self.arena.forget(now.held_by_all, now.settled)
        base = None if self._steps is None else self._steps.base()
        slot = None if base is None else self.arena.take(nbytes, now.held_by_all, [base])
        slot = self.arena.take(nbytes, now.held_by_all, ()) if slot is None else slot
        if slot is None:
            raise NoRoom("all slots for replicas hold what is still needed")
        return slot

    def let_go(self) -> None:
        """Lets go of the replicas when a transfer in flight has ended, so that the next job in this process finds
        them."""
        close = partial(self.arena.close, unlink=False)
        if self.stream.thread.busy:  # maybe for a minute yet, with a rank that is gone: only its replica has its share
            self.arena.show()
            self.stream.thread.put(close)
        else:  # it may not run: the session is given up if the system has no thread for it
            close()
