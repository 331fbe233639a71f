"""The replicator: sends this rank's snapshots to their holders, and keeps those of the ranks it holds.

All ranks begin the same snapshots at the same step, so a holder knows which replica comes next and waits for it with a
time-out; no rank listens without end. What a holder has in its own share of the state, as with data parallelism, it
copies itself, and only the rest is sent. One thread for each direction of each pair of ranks; gloo moves the bytes
without the GIL. What goes wrong is noted and told by the beat: training never waits for a replica.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Concatenate

import torch.distributed as dist

from ckptlib.errors import CkptError, CorruptData, FormatError, NoRoom, WaitTimeout
from ckptlib.format.body_layout import body_nbytes
from ckptlib.format.keys import SaveId
from ckptlib.format.table import Table
from ckptlib.jobs import Given, JobThread
from ckptlib.pages import round_up
from ckptlib.peers.increment_receiver import StepReceiver
from ckptlib.peers.increment_sender import StepSender
from ckptlib.peers.ranges import ByteRange, Ranges, everything
from ckptlib.peers.transfer import receive_slot, send_slot, withdraw
from ckptlib.policy.peers import OPTIMIZER, Peers
from ckptlib.ranks.link import Link
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.placement import ReplicaMap
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import SnapshotReader
from ckptlib.staging.arena import Arena
from ckptlib.staging.pair import CopySource
from ckptlib.staging.stager import CopyJob, Staging

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 5.0
LAST_BACKOFF_S = 300.0
"""How long the ranks wait before they connect anew: from the first value to the last, doubled each time."""

RECONNECT = timedelta(seconds=5)
"""Least time-out for connecting anew, while the training waits; four times what the first time took, if that is
more."""


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


FindAlike = Callable[[int, Table], tuple[Sequence[CopySource], tuple[int, ...]] | None]
"""Takes a rank and the table of its last snapshot; returns the shards of it that this rank has, too, and their offsets
in the body."""


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


class Replicator:
    """Sends and receives replicas. One per rank; for the main thread. Its own threads send and receive."""

    def __init__(
        self,
        over: dist.ProcessGroup | None,
        rank: int,
        placement: ReplicaMap,
        peers: Peers,
        make_arena: Callable[[], Arena],
    ) -> None:
        """`over`: the ranks of the placement; call `connect` before the first snapshot. `make_arena`: for the replicas
        of one rank."""
        self._over = over
        self._rank = rank
        self._world_size = len(placement.domains)
        self._peers = peers
        self._arenas = {origin: make_arena() for origin in placement.origins(rank)}
        self._readers = {origin: SnapshotReader() for origin in self._arenas}
        self._senders = {to: JobThread(f"to-{to}") for to in placement.holders[rank]}
        self._receivers = {origin: JobThread(f"from-{origin}") for origin in self._arenas}
        coded = peers.link == OPTIMIZER
        self._sent = {to: StepSender() for to in self._senders if coded}
        self._held = {origin: StepReceiver() for origin in self._receivers if coded}
        self._unlike: set[int] = set()
        """Ranks whose replicas come whole, since what this rank has of them was found to differ."""
        self._failing: set[str] = set()
        """Problems that were logged and have not passed since."""
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = 0.0
        self._connect_within = peers.timeout
        self._link: Link | None = None
        self._broken: Link | None = None

    def start(self) -> None:
        """Starts the threads. Raises RuntimeError."""
        for stream in self._streams():
            stream.start()

    # Snapshots

    def local_replicas(self, now: Round, find: FindAlike) -> list[CopyJob]:
        """Returns copies of those shards of incoming replicas that this rank has itself, into their slots."""
        found = []
        for origin, receiver in self._receivers.items():
            # while a receiver is busy, its arena and its reader are its own
            if self._link is None or receiver.busy or self._peers.everything or origin in self._unlike:
                continue
            table = self._readers[origin].table(origin)
            alike = None if table is None else find(origin, table)
            if table is not None and alike is not None:
                nbytes = body_nbytes(table)
                try:
                    slot = self._take(origin, now, nbytes)
                except NoRoom:
                    continue  # that is told when the snapshot comes
                size, sequence = self._world_size, 2 * now.number - 1
                header = SlotHeader(now.root_id, now.save, origin, size, now.number, sequence, nbytes, {})
                found.append(CopyJob(slot, header, *alike))
        return found

    def begin(self, now: Round, staging: Staging | None, local_replicas: Sequence[CopyJob]) -> ReplicaOutcome:
        """Replicates this rank's snapshot as soon as it is ready, and receives those that come here.

        `staging`: None if this rank could not begin one. `local_replicas` are filled when it is done.
        """
        filled = {} if staging is None else {twin.header.rank: self._filled(twin, staging) for twin in local_replicas}
        link, outcome = self._link, ReplicaOutcome(len(self._senders))
        for to, sender in self._senders.items():
            if link is None:
                outcome.note(sealed=False)
            else:
                sender.put(partial(_guarded, link, self._send, to, now, staging, outcome))
        for origin, receiver in self._receivers.items():
            if link is not None:
                receiver.put(partial(_guarded, link, self._receive, origin, now, filled.get(origin)))
        return outcome

    def _filled(self, twin: CopyJob, staging: Staging) -> _Filled:
        table = self._readers[twin.header.rank].table(twin.header.rank)
        assert table is not None
        return _Filled(twin, staging, table.digest)

    def _send(self, link: Link, to: int, now: Round, staging: Staging | None, outcome: ReplicaOutcome) -> None:
        step, sealed, sent, steps = now.save.step, False, 0, self._sent.get(to)
        try:
            if staging is not None:
                with suppress(WaitTimeout):  # then its holders are told, or they would take the next one for it
                    staging.wait_done(self._peers.timeout.total_seconds())
            if staging is None or not staging.done or staging.error is not None:
                withdraw(link, to, self._rank, f"there is no snapshot of step {step}")
            else:
                if steps is not None:
                    steps.begin(now.may_go)
                try:
                    header = staging.slot.read_header()
                except CkptError as error:
                    withdraw(link, to, self._rank, str(error))
                    raise
                sent = send_slot(link, to, staging.slot, header, steps)
                sealed = True
                self._backoff_s = FIRST_BACKOFF_S  # the link is good: the next time that it breaks is another one
                self._told(f"replicas on rank {to}", step, None)
        except CkptError as error:
            self._told(f"replicas on rank {to}", step, error)
        finally:
            outcome.note(sealed, sent, steps)

    def _receive(self, link: Link, origin: int, now: Round, twin: _Filled | None) -> None:
        arena, taken, steps = self._arenas[origin], list[Slot](), self._held.get(origin)
        filled: _Filled | None = None
        """The twin, if its slot is the one that was taken, and its copies are of this snapshot."""
        out_of_step = False

        def take(offered: SlotHeader) -> Slot:
            nonlocal filled, out_of_step
            if (offered.root_id, offered.save, offered.number) != (now.root_id, now.save, now.number):
                out_of_step = True
                raise FormatError(
                    f"rank {origin} offers snapshot {offered.number} ({offered.save}) of {offered.root_id}, expected "
                    f"{now.number} ({now.save}) of {now.root_id}"
                )
            if twin is not None and twin.wait(self._peers.timeout) and twin.is_of(offered):
                filled = twin
            taken.append(self._take(origin, now, offered.body_nbytes) if filled is None else filled.slot)
            return taken[0]

        def lacks(offered: SlotHeader) -> Ranges:
            return everything(offered) if filled is None else filled.lacks(offered)

        def on_sealed() -> None:
            arena.mark_ready(taken[0], now.save.step)

        try:
            if steps is not None:
                steps.begin(now.may_go)
            receive_slot(link, origin, origin, take, self._readers[origin], lacks, steps, on_sealed)
            self._told(f"replicas of rank {origin}", now.save.step, None)
        except CkptError as error:
            if isinstance(error, CorruptData) and filled is not None:
                self._unlike.add(origin)
                log.error("replicas of rank %d are sent whole from here on; what this rank has differs", origin)
            if isinstance(error, (CorruptData, FormatError)) and steps is not None and steps.used:
                steps.distrusted = True
                log.error("snapshots of rank %d come without increments from here on; one came out wrong", origin)
            if out_of_step:  # this rank would refuse each one that follows: all connect anew
                link.cut()
            self._told(f"replicas of rank {origin}", now.save.step, error)
        finally:
            if twin is not None:
                twin.staging.wait_done(None)  # until then it is written to, and nobody else may have it
            for slot in arena.slots:  # not the twin's, which is gone if it was too small
                slot.unlock()

    def _take(self, origin: int, now: Round, nbytes: int) -> Slot:
        """Returns a slot for a replica. Raises NoRoom."""
        arena = self._arenas[origin]
        arena.forget(now.held_by_all, now.settled)
        steps = self._held.get(origin)
        base = None if steps is None else steps.base()
        slot = None if base is None else arena.take(nbytes, now.held_by_all, [base])
        slot = arena.take(nbytes, now.held_by_all, ()) if slot is None else slot
        if slot is None:
            raise NoRoom("all slots for replicas hold what is still needed")
        return slot

    def _told(self, what: str, step: int, error: CkptError | None) -> None:
        """Warns of the first failure and of the first success after it: there may be a snapshot at every step."""
        if error is None and what in self._failing:
            self._failing.discard(what)
            log.warning("%s: there is one of step %d again", what, step)
        elif error is not None and what not in self._failing:
            self._failing.add(what)
            log.warning("%s: there is none of step %d: %s", what, step, error)

    @property
    def arenas(self) -> list[Arena]:
        return [*self._arenas.values()]

    @property
    def bases(self) -> list[Slot]:
        """Slots of this rank that serve as bases of what is being sent. For the main thread."""
        found = (steps.base for to, steps in self._sent.items() if self._senders[to].busy)
        return [slot for slot in found if slot is not None]

    # The link

    @property
    def link_failed(self) -> bool:
        """Whether a peer could not be reached: gloo has closed that connection for good, so all must connect anew."""
        return self._link is not None and self._link.broken

    @property
    def linked(self) -> bool:
        """Whether snapshots are replicated, as far as all ranks have agreed."""
        return self._link is not None or not (self._senders or self._receivers)

    @property
    def calm(self) -> bool:
        """Whether this rank is ready to connect anew."""
        return time.monotonic() >= self._retry_at and not any(stream.busy for stream in self._streams())

    def drop_link(self) -> None:
        """Gives up the link, since some rank lost a peer: nothing is replicated until all connect anew. Called on all
        ranks at the same step."""
        self._broken, self._link = self._link or self._broken, None
        self._retry_at = time.monotonic() + self._backoff_s
        log.warning(
            "a link between peers failed: snapshots have no replicas until the ranks connect anew, in %.0f s or later",
            self._backoff_s,
        )
        self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)

    def connect(self) -> None:
        """Connects the ranks. Collective. Raises AgreementFailed."""
        if self._broken is not None:
            self._broken.close()
            self._broken = None
        if self._over is not None and self._peers.copies:
            began = time.monotonic()
            self._link = Link(self._over, self._peers.timeout, self._connect_within)
            took = timedelta(seconds=time.monotonic() - began)
            self._connect_within = min(max(RECONNECT, 4 * took), self._peers.timeout)

    def _streams(self) -> list[JobThread]:
        return [*self._senders.values(), *self._receivers.values()]

    def close(self, clean: bool) -> None:
        """Closes the replicator. `clean`: waits for transfers in flight, and removes the replicas.

        If not `clean`, waits for nothing: replicas are let go when the transfers in flight have ended, so that the next
        job in this process finds them.
        """
        if not clean:
            for origin, receiver in self._receivers.items():
                close = partial(self._arenas[origin].close, unlink=False)
                if receiver.busy:  # maybe for a minute yet, with a rank that is gone: only its replica has its share
                    self._arenas[origin].show()
                    receiver.put(close)
                else:  # it may not run: the session is given up if the system has no thread for it
                    close()
            for stream in self._streams():
                stream.leave()
            return
        for stream in self._streams():
            stream.finish()  # each job has time-outs
        if self._link is not None:
            self._link.close()
        for arena in self._arenas.values():
            arena.close(unlink=True)


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


def _guarded(link: Link, job: Callable[Concatenate[Link, Given], None], *args: Given.args, **kw: Given.kwargs) -> None:
    try:
        job(link, *args, **kw)
    except Exception:  # a bug, or no memory: the other end would take the next message for one that did not come
        log.exception("a replica failed")
        link.cut()
