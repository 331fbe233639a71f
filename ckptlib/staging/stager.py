"""Staging: the copy of this rank's shards into a slot, and the seal that makes it a snapshot.

Tensors that have not earned overlap are copied before `copy` returns; the rest by a thread, behind the fence. If
somebody wrote past the fence meanwhile, the snapshot is torn and never becomes ready.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ckptlib.errors import CkptError, SaveFailed, TornSnapshot, WaitTimeout
from ckptlib.format.body_layout import body_nbytes
from ckptlib.format.check import compared
from ckptlib.format.digests import digester
from ckptlib.format.documents import encode
from ckptlib.format.table import Table
from ckptlib.format.values import Json
from ckptlib.jobs import JobThread
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.staging.copies import Pairs
from ckptlib.staging.device_copies import Copied, DeviceCopies, Devices
from ckptlib.staging.host_copies import HostCopies
from ckptlib.staging.known_copies import KnownPairs
from ckptlib.staging.pair import CopySource
from ckptlib.staging.pieces import Scratch
from ckptlib.staging.replica_digests import Reading
from ckptlib.staging.spare_memory import Body
from ckptlib.staging.watch import Watch

log = logging.getLogger(__name__)

COPY_TIMEOUT_S = 600.0
"""How long to wait for a copy. It runs at memory speed, so one that takes longer has lost its thread."""


@dataclass(frozen=True, slots=True)
class CopyJob:
    """The copies into one slot."""

    slot: Slot
    header: SlotHeader
    """The slot's header while it is filled."""
    sources: Sequence[CopySource]
    offsets: tuple[int, ...]
    """The offset of each source in the body."""


@dataclass(frozen=True)
class Content:
    """Everything of a snapshot except its bytes."""

    header: SlotHeader
    """The slot's header, without documents."""
    layout: bytes
    table: Table
    values: Mapping[str, Json]
    metrics: Mapping[str, Json]
    created: float
    algorithm: str
    exempt: bool = False
    """Whether the step stays for good."""
    account: Mapping[str, Json] = field(default_factory=dict)
    """How this start of the job had spent its time by then; see `format.account`."""


class Staging:
    """One snapshot in the making. Sources are kept alive until they are copied."""

    def __init__(self, slot: Slot, content: Content) -> None:
        self.slot = slot
        self.content = content
        self.error: Exception | None = None
        self.seconds = 0.0
        """Seconds of the copy behind the fence."""
        self.fence_s = 0.0
        """Seconds that threads waited for that copy."""
        self.device_copies: list[DeviceCopies] = []
        """Copies in flight on devices."""
        self.watch = Watch([])
        """Watches what is copied behind the fence until nobody has to wait any more."""
        self.overlapped = False
        """Whether anything is copied behind the fence."""
        self.frozen: Mapping[int, tuple[str, bool]] = {}
        """The names of the large shards to which nobody writes, and whether they overlap, by place in the table."""
        self.changed: Sequence[str] = ()
        """The names of frozen ones that have other bytes than in the snapshot before, or were written to meanwhile."""
        self.may_change: set[str] = set()
        """The names of the frozen tensors that are copied behind the fence, for replicas of other ranks, too."""
        self.check = compared(content.header.number)
        """This rank's check of what others hold, too; known when the snapshot is sealed."""
        self._copied = threading.Event()
        self._sealed = threading.Event()
        self._hand_over: Callable[[], None] | None = None

    @property
    def step(self) -> int:
        return self.content.header.save.step

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Fails the snapshot with what the body raises, except Ctrl-C. Other ranks begin their snapshots, and learn of
        the failure from this rank's."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, CkptError):
                log.error("the snapshot of step %d could not be begun: %s", self.step, traceback.format_exc())
            self.error = error.with_traceback(None)  # its frames would keep tensors that were made for the snapshot

    def go(self) -> None:
        """Has the thread begin, unless it has already. Main thread."""
        if self._hand_over is not None:
            self._hand_over()
            self._hand_over = None  # only now: after Ctrl-C in between, nobody would copy

    def fail_left(self) -> None:
        """Fails the snapshot unless `go` was called: the caller was interrupted in between, as by Ctrl-C, and nothing
        may have kept anybody from writing to its tensors since. Never called while it is begun: see `Outcomes.turn`."""
        if self._hand_over is not None:
            self.error = SaveFailed(f"step {self.step} was not saved: it was interrupted as its snapshot began")
            self.go()

    def wait_copied(self) -> None:
        """Returns when the sources are no longer read; on devices, the current stream is made to wait instead.

        Raises WaitTimeout.
        """
        self.go()  # an interrupted caller had closed the fence already, or nobody would wait here
        began = time.perf_counter()
        for copies in self.device_copies:
            copies.hold_compute()
        if self.device_copies:  # the caller writes as soon as this returns, when they may not have ended
            self.watch.look()
        copied = self._copied.wait(COPY_TIMEOUT_S)
        self.fence_s += time.perf_counter() - began
        if not copied:
            raise WaitTimeout(f"the copy of step {self.step} still read its tensors after {COPY_TIMEOUT_S:.0f} s")

    @property
    def copied(self) -> bool:
        """Whether nobody has to wait any more, on any stream, before writing to the sources."""
        copied = self._copied.is_set() and (self.done or all(copies.read for copies in self.device_copies))
        if copied:
            self.watch.look()
        return copied

    @property
    def done(self) -> bool:
        """Whether the snapshot is ready or has failed."""
        return self._sealed.is_set()

    def wait_done(self, timeout_s: float | None) -> None:
        """Returns when the snapshot is ready or has failed. Raises WaitTimeout."""
        if not self._sealed.wait(timeout_s and min(timeout_s, threading.TIMEOUT_MAX)):
            raise WaitTimeout(f"the snapshot of step {self.step} was not ready within {timeout_s} s")

    def wait_sealed(self, timeout_s: float | None) -> None:
        """Returns when the snapshot is ready. Raises the error that made it fail, or WaitTimeout. Any thread."""
        self.wait_done(timeout_s)
        if self.error is not None:
            raise self.error


class Stager:
    """The thread that copies and seals; one per rank."""

    def __init__(
        self,
        on_sealed: Callable[[Staging], None],
        on_begun: Callable[[Staging], None] = lambda staging: None,
        spare: bool = False,
    ) -> None:
        """`on_begun` is called from the thread before it copies, `on_sealed` when a staging is ready or has failed.

        `spare`: whether devices keep a copy in their own memory, if it fits, so that the fence waits for no link.
        """
        self._on_sealed = on_sealed
        self._on_begun = on_begun
        self._devices = Devices(spare)
        self._scratch = Scratch()
        self._random = np.random.default_rng(0xC0FFEE)
        self._known = KnownPairs()
        self._own: tuple[Table | None, tuple[int, ...]] = None, ()
        """The last table, and its offsets."""
        self._begun: Staging | None = None
        """The newest staging."""
        self._sealed: tuple[Table | None, list[str]] = None, []
        """The table of the last snapshot that was sealed, and the digests of its chunks. Staging thread."""
        self._jobs = JobThread("stage")

    def start(self) -> None:
        """Starts the thread. Raises RuntimeError."""
        self._jobs.start()

    def begin(self, slot: Slot, content: Content) -> Staging:
        """Returns a snapshot of which nothing is copied yet: see `copy`. Once it exists, it comes to an end."""
        self.fail_left()
        staging = self._begun = Staging(slot, content)
        self._hand_over(staging, HostCopies((), self._random, self._scratch), None)
        return staging

    @torch.no_grad()
    def copy(
        self,
        staging: Staging,
        sources: Sequence[CopySource],
        local_replicas: Sequence[CopyJob] = (),
        spare: bool = True,
        reading: Reading | None = None,
    ) -> None:
        """Copies what must be copied now; the thread does the rest after `Staging.go`. The caller fails the snapshot
        with any error raised: copies begun by then end before the slot is free.

        `sources` are in the table's order.

        `local_replicas`: replicas of other ranks' snapshots, as far as this rank has the same shards. They are copied,
        too, when the snapshot is done.

        `spare`: whether memory of the device may be taken for it, which is not before training has shown its peak.

        `reading`: of what other ranks hold, too, as far as it is not read yet; None if the ranks compared it before.

        Raises NoRoom if a slot cannot be written, before anything is: a slot that still says it is ready keeps what it
        holds.
        """
        header = replace(staging.content.header, sequence=staging.content.header.sequence - 1)
        jobs = [CopyJob(staging.slot, header, sources, self._offsets(staging.content.table, sources)), *local_replicas]
        for job in jobs:
            job.slot.write_header(job.header)
        parts: list[Pairs] = []
        copied: list[Copied] = []
        for job in jobs:
            found = self._known.pairs_of(job.header.rank, job.slot, job.sources, job.offsets)
            for pairs in found:
                pairs.move_now(job.slot.mapped)
            parts += found
            copied.append(Copied(job.header.rank, Body(job.offsets, job.header.body_nbytes), found))
        for begun in self._devices.begin(copied, spare):
            staging.device_copies.append(begun)
        staging.may_change = {name for some in parts for name in some.frozen}
        host_copies = HostCopies(parts, self._random, self._scratch)
        counts = [counts for copies in staging.device_copies for counts in copies.counts] + host_copies.counts
        staging.watch, staging.overlapped = Watch(counts), any(some.names for some in counts)
        staging.frozen = {i: (source.name, source.overlap) for i, source in enumerate(sources) if source.frozen}
        waits = host_copies or any(copies.driven for copies in staging.device_copies)
        if not (waits or (reading is not None and reading.late)):
            staging._copied.set()
        self._hand_over(staging, host_copies, reading)

    def _hand_over(self, staging: Staging, host_copies: HostCopies, reading: Reading | None) -> None:
        """Sets what the thread does after `Staging.go`."""
        staging._hand_over = lambda: self._jobs.put(lambda: self._finish(staging, host_copies, reading))

    def fail_left(self) -> None:
        """See `Staging.fail_left`."""
        if self._begun is not None:
            self._begun.fail_left()
            self._begun = None  # only now: after Ctrl-C in between, it would never end

    def _offsets(self, table: Table, sources: Sequence[CopySource]) -> tuple[int, ...]:
        """Returns the table's offsets; the same object as long as the table is the same."""
        if self._own[0] is not table:
            self._own = table, table.begins(source.tensor.nbytes for source in sources)
        return self._own[1]

    @property
    def ready(self) -> bool:
        """Whether another snapshot may begin: no device memory that it would go by is still on its way to the host."""
        return self._devices.ready

    @torch.no_grad()
    def _finish(self, staging: Staging, host_copies: HostCopies, reading: Reading | None) -> None:
        if staging.done:  # handed over twice: `go` was interrupted
            return
        try:
            began = time.perf_counter()
            try:
                self._on_begun(staging)
                if staging.error is not None:
                    raise staging.error
                for copies in staging.device_copies:
                    copies.drive()
                host_copies.move()
                if reading is not None:
                    reading.read_late()
                _raise_torn(staging, host_copies.written())
            finally:
                staging.seconds = time.perf_counter() - began
                host_copies.clear()
                if not staging.device_copies:
                    staging.watch.look()
                staging._copied.set()
                # all devices, whatever went wrong: the slot may be another snapshot's as soon as this one has failed
                written = [name for copies in staging.device_copies for name in copies.finish()]
            _raise_torn(staging, written or staging.watch.written)
            if reading is not None:
                staging.check = reading.finish(staging.content.header.rank)
            table, before = self._sealed
            self._sealed = staging.content.table, _seal(staging, before if table is staging.content.table else None)
        except Exception as error:  # kept for whoever waits, and reported to the other ranks; the thread must live on
            staging.error = error
        if reading is not None:
            reading.let_go()
        staging.watch.look()  # to let go, if nobody has looked because the snapshot failed
        self._on_sealed(staging)
        staging._sealed.set()  # last: a process that waited may be killed at once; the writer has its order

    def forget_tensors(self) -> None:
        """Forgets all tensors: the next snapshot looks up all that it copies, and takes memory of devices anew. Only
        while none is in flight."""
        self._known.clear()
        self._devices.clear()

    def close(self) -> None:
        """Waits for the copies in flight, and ends the thread."""
        self.fail_left()
        self._jobs.finish()
        self._known.clear()
        self._devices.clear()


def _raise_torn(staging: Staging, written: Sequence[str]) -> None:
    if written:
        staging.changed = [name for name in written if name in staging.may_change]
        raise TornSnapshot(
            f"step {staging.step}: {written[0]} was modified while it was being copied; whatever modifies the state, "
            "other than its optimizers, must do so inside `with checkpointer.updating():`"
        )


def _check_frozen(staging: Staging, digests: list[str], before: list[str] | None) -> None:
    """Finds which shards have changed to which nobody should write. Raises TornSnapshot if one of them overlapped: it
    was copied while anybody could write to it, so only the same bytes as before prove the copy.

    `before`: the digests of the snapshot before, if it had the same table.
    """
    if not staging.frozen:
        return
    late = [name for name, overlaps in staging.frozen.values() if overlaps]
    if before is None:
        if late:
            raise TornSnapshot(f"step {staging.step}: no snapshot before it shows the bytes of {late[0]}")
        return
    changed = {chunk for chunk, pair in enumerate(zip(digests, before, strict=True)) if pair[0] != pair[1]}
    chunks = staging.content.table.chunks
    staging.changed = [name for i, (name, _) in staging.frozen.items() if not changed.isdisjoint(chunks(i))]
    torn = {*late}.intersection(staging.changed)
    if torn:
        raise TornSnapshot(
            f"step {staging.step}: {min(torn)} asks for no gradient, but has changed since the save before; from now "
            "on it is copied before after_step returns"
        )


def _seal(staging: Staging, before: list[str] | None) -> list[str]:
    """Writes digests, documents, and last of all the header that says ready; returns the digests. `before`, and errors:
    see `_check_frozen`."""
    content, slot = staging.content, staging.slot
    digest, body, table = digester(content.algorithm), slot.body, content.table
    digests = [digest(body[o : o + n]) for o, n in zip(table.offsets, table.nbytes, strict=True)]
    _check_frozen(staging, digests, before)
    snapshot = encode(
        "snapshot",
        {
            "created": content.created,
            "algorithm": content.algorithm,
            "digests": "".join(digests),
            "metrics": dict(content.metrics),
            "values": dict(content.values),
            **({"exempt": True} if content.exempt else {}),
            **({"account": dict(content.account)} if content.account else {}),
        },
    )
    places = slot.write_documents(
        body_nbytes(table), {"layout": content.layout, "table": table.encoded.encode(), "snapshot": snapshot}
    )
    slot.write_header(replace(content.header, documents=places, check=staging.check))
    return digests
