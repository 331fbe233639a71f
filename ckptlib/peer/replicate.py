"""The replicator: sends this rank's snapshots to their holders, and keeps those of the ranks it holds.

All ranks begin the same snapshots at the same step, so a holder knows what comes and waits for it with a time-out; no
rank listens for what may never come. One thread for each direction of each pair of ranks; gloo moves the bytes without
the GIL. What goes wrong is noted and told by the beat: training never waits for a replica.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from ckptlib.arena import Arena
from ckptlib.errors import CkptError, FormatError, NoRoom
from ckptlib.keys import SaveId
from ckptlib.peer.link import Link
from ckptlib.peer.peers import Peers
from ckptlib.peer.transfer import receive_slot, send_slot, withdraw
from ckptlib.placement import Placement
from ckptlib.slot import Slot, SlotHeader
from ckptlib.snapshot import SnapshotReader
from ckptlib.stage import Staging

log = logging.getLogger(__name__)

FIRST_BACKOFF_S = 5.0
LAST_BACKOFF_S = 300.0
"""How long the ranks wait before they connect anew; doubled each time."""

Job = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Round:
    """One snapshot of the job: what all ranks know of it when they begin it."""

    root_id: str
    save: SaveId
    number: int
    """See `SlotHeader.number`."""
    held_by_all: int
    """Its replica stays, and those of later steps."""
    settled: int
    """Those of steps after `held_by_all` and up to this one failed on some rank, and may go."""


class Fate:
    """What becomes of one snapshot at its holders."""

    def __init__(self, num_holders: int) -> None:
        self._left = num_holders
        self._lock = threading.Lock()
        self.failed = False
        """Whether a holder has no replica; not before it is settled can it be said that all have."""

    def note(self, sealed: bool) -> None:
        with self._lock:
            self._left -= 1
            self.failed = self.failed or not sealed

    @property
    def settled(self) -> bool:
        return self._left == 0


class Replicator:
    """One per rank. Main thread, but for what its own threads do."""

    def __init__(
        self,
        over: dist.ProcessGroup | None,
        rank: int,
        placement: Placement,
        peers: Peers,
        make_arena: Callable[[], Arena],
    ) -> None:
        """Collective over `over`, the ranks of the placement. `make_arena`: for the replicas of one rank."""
        self._over = over
        self._rank = rank
        self._peers = peers
        self._arenas = {origin: make_arena() for origin in placement.origins(rank)}
        self._readers = {origin: SnapshotReader() for origin in self._arenas}
        self._senders = {to: _Stream(f"to-{to}") for to in placement.holders[rank]}
        self._receivers = {origin: _Stream(f"from-{origin}") for origin in self._arenas}
        self._failing: set[str] = set()
        """What was warned of and has not succeeded since."""
        self._backoff_s = FIRST_BACKOFF_S
        self._retry_at = 0.0
        self._link: Link | None = None
        self._broken: Link | None = None
        self.connect()

    # Snapshots

    def begin(self, now: Round, staging: Staging | None) -> Fate:
        """Replicates this rank's snapshot as soon as it is ready, and receives those that come here.

        `staging`: None where this rank could not begin one.
        """
        link, fate = self._link, Fate(len(self._senders))
        for to, sender in self._senders.items():
            if link is None:
                fate.note(sealed=False)
            else:
                sender.put(partial(self._send, link, to, now, staging, fate))
        for origin, receiver in self._receivers.items():
            if link is not None:
                receiver.put(partial(self._receive, link, origin, now))
        return fate

    def _send(self, link: Link, to: int, now: Round, staging: Staging | None, fate: Fate) -> None:
        step, sealed = now.save.step, False
        try:
            if staging is not None:
                staging.wait_done(self._peers.timeout.total_seconds())
            if staging is None or staging.error is not None:
                withdraw(link, to, self._rank, f"there is no snapshot of step {step}")
            else:
                send_slot(link, to, staging.slot, staging.slot.read_header())
                sealed = True
                self._told(f"replicas on rank {to}", step, None)
        except CkptError as error:
            self._told(f"replicas on rank {to}", step, error)
        finally:
            fate.note(sealed)

    def _receive(self, link: Link, origin: int, now: Round) -> None:
        arena, taken = self._arenas[origin], list[Slot]()
        arena.forget(now.held_by_all, now.settled)

        def take(offered: SlotHeader) -> Slot:
            if (offered.root_id, offered.save, offered.number) != (now.root_id, now.save, now.number):
                raise FormatError(
                    f"rank {origin} offers snapshot {offered.number} ({offered.save}) of {offered.root_id}, expected "
                    f"{now.number} ({now.save}) of {now.root_id}"
                )
            slot = arena.take(offered.body_nbytes, now.held_by_all, ())
            if slot is None:
                raise NoRoom("all slots for replicas hold what is still needed")
            taken.append(slot)
            return slot

        try:
            receive_slot(link, origin, origin, take, self._readers[origin])
            arena.mark_ready(taken[0], now.save.step)
            self._told(f"replicas of rank {origin}", now.save.step, None)
        except CkptError as error:
            self._told(f"replicas of rank {origin}", now.save.step, error)
        finally:
            for slot in taken:
                slot.unlock()

    def _told(self, what: str, step: int, error: CkptError | None) -> None:
        """Warns of the first failure and of the first success after it: there may be a snapshot at every step."""
        if error is None and what in self._failing:
            self._failing.discard(what)
            log.warning("%s: there is one of step %d again", what, step)
        elif error is not None and what not in self._failing:
            self._failing.add(what)
            log.warning("%s: there is none of step %d: %s", what, step, error)

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
        """Some rank lost a peer: nothing is replicated until all connect anew. On all ranks at the same step."""
        self._broken, self._link = self._link or self._broken, None
        self._retry_at = time.monotonic() + self._backoff_s
        log.warning(
            "a link between peers failed: snapshots have no replicas until the ranks connect anew, in %.0f s or later",
            self._backoff_s,
        )
        self._backoff_s = min(2 * self._backoff_s, LAST_BACKOFF_S)

    def connect(self) -> None:
        """Collective. Raises AgreementFailed."""
        if self._broken is not None:
            self._broken.close()
            self._broken = None
        if self._over is not None and self._peers.copies:
            self._link = Link(self._over, self._peers.timeout)

    def _streams(self) -> list[_Stream]:
        return [*self._senders.values(), *self._receivers.values()]

    def close(self, clean: bool) -> None:
        """Lets go; `clean`: what is under way is waited for, and the replicas go."""
        if clean:
            for stream in self._streams():
                stream.finish()
            if self._link is not None:
                self._link.close()
            for arena in self._arenas.values():
                arena.close(unlink=True)


class _Stream:
    """A thread that does its jobs in order."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_open = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"ckptlib-{name}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._num_open > 0

    def put(self, job: Job) -> None:
        with self._lock:
            self._num_open += 1
        self._jobs.put(job)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # it is a bug, but not one to leave the other ranks waiting for this one
                log.exception("a replica failed")
            with self._lock:
                self._num_open -= 1

    def finish(self) -> None:
        """Waits for all jobs; each of them has time-outs."""
        self._jobs.put(None)
        self._thread.join()
