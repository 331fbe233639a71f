"""A slot on another host, or a share on its disk, read by ranged requests over the Link: only the requested bytes
travel, straight to their place.

    asker                                                 server
    number of an offer, first byte, bytes, stream     -->  offered to this asker, and not past its end?
    the reader's own buffer                           <--  the bytes, out of memory or from a disk; or as many zeros
    verdict                                           <--  good, or why they are zeros

Both ends know the offers, from the plan on which all ranks agreed; they are numbered in its order. An asker has a few
streams to each server, with one request under way in each, so that a transfer goes on while a reader checks what came.
A server has a few threads, which answer whoever asks next: in a job of a thousand ranks, a server may have hundreds of
askers.

What a peer asks or sends is hostile until checked: a server reads nothing but what was offered to that asker, and
whoever reads compares digests.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

import torch.distributed as dist
from typing_extensions import override

from ckptlib.catalog.unreadable import UNUSABLE
from ckptlib.errors import AgreementFailed, CorruptData, FormatError, NewerFormat, ObjectUnreadable
from ckptlib.pages import PAGE_BYTES
from ckptlib.peers.transfer import MAX_DOCUMENTS_BYTES
from ckptlib.ranks.group import Group
from ckptlib.ranks.link import Link
from ckptlib.ranks.together import together_while_all_live
from ckptlib.recovery.inventory import Found
from ckptlib.slots.readable import ReadableSlot
from ckptlib.stores.io_limits import RUN_BYTES, IoLimits

log = logging.getLogger(__name__)

STREAMS = 4
"""Streams for each pair of an asker and a server; also a server's threads."""

PIECE_BYTES = 64 * 1024 * 1024
"""Most bytes that one request asks for; a larger request is not answered."""

GATHERED = IoLimits(most=RUN_BYTES // 2, direct_from=RUN_BYTES // 2, threads=STREAMS)
"""Limits for what is on other hosts: tensors of a few megabytes come several at a time, since each message costs gloo
as much CPU as a copy of some megabytes. Their buffers are fresh memory: 0.5 GB in tensors of 3.3 MB took 0.60 s with
eight of 16 MiB, 0.47 with four, and 0.40 with four of 8 MiB."""

_REQUEST = struct.Struct("<QQQQ")
"""The number of the offer, the first byte, how many bytes, and the stream in which they are to come."""

_DONE = 2**64 - 1
"""Sent instead of an offer, once for each thread: no rank has more requests."""

DONE_WITHIN_S = 5.0
"""How long a rank waits for _DONE once all have agreed: the rank that is to send it may have died since."""

_VERDICT = struct.Struct("<?I507s")
"""Whether the bytes are the slot's; if not, why: the length of a text, the text in UTF-8, with the error's class."""

_SAID = {cls.__name__: cls for cls in (*UNUSABLE, NewerFormat)}
"""Classes that are raised if a server names them: a step fares as if this rank had read it itself."""


T = TypeVar("T", bound=Hashable)
"""The type of what is offered, as all ranks know it."""


class Offered(Protocol):
    """Bytes that a rank reads out, from the first up to `end`. Any thread may use it."""

    where: str
    """The place, for messages."""

    @property
    def end(self) -> int: ...

    def view(self, at: int, nbytes: int) -> memoryview:
        """Returns `nbytes` bytes from this one on; fewer where it ends. Raises CkptError."""


def link_among(group: Group, over: dist.ProcessGroup | None, timeout: timedelta) -> Link:
    """Connects the ranks of a group, which is over `over`; collective. Raises AgreementFailed.

    A rank that dies just before it connects is not waited for: the group tells.
    """
    assert over is not None, "one process has all that it restores itself"
    return together_while_all_live(group, "connecting", lambda: Link(over, timeout))


class Exchange(Generic[T]):
    """The reading out between ranks: both ends of it on this rank. For the main thread; its own threads serve."""

    def __init__(self, link: Link, timeout: timedelta, open_here: Callable[[T], Offered]) -> None:
        """`link`: for this alone, and closed with it. `open_here`: opens what this host offers, from any thread."""
        self._link = link
        self._timeout = timeout
        self._open = open_here
        self._offers: dict[int, list[T]] = {}
        """What this rank offers to each asker."""
        self._first_askers: dict[int, int] = {}
        """The first rank that asks each server, which ends that server's threads."""
        self._threads: list[threading.Thread] = []
        self._zeros = memoryview(b"")
        self._remotes: dict[int, Remote] = {}
        """The other ranks that offer something to this one, by rank."""

    @property
    def nbytes_received(self) -> int:
        return sum(remote.nbytes_received for remote in self._remotes.values())

    def add(self, moves: Iterable[tuple[T, int, int]]) -> dict[T, RemoteBytes]:
        """Adds offers. `moves`: what is offered, who reads it out from now on, and to whom. Returns what others read
        out to this rank. All ranks add the same. Raises ObjectUnreadable if this rank has no thread to serve with: all
        are added then."""
        added = {}
        for what, sender, receiver in moves:
            self._first_askers.setdefault(sender, receiver)
            if sender == self._link.rank:
                self._offers.setdefault(receiver, []).append(what)
            if receiver == self._link.rank:
                if sender not in self._remotes:
                    self._remotes[sender] = Remote(self._link, sender, self._timeout)
                added[what] = self._remotes[sender].next_offer()
        if self._offers:
            self._start()
        return added

    def _start(self) -> None:
        self._zeros = self._zeros or memoryview(bytes(PIECE_BYTES))  # which take no memory before they are written to
        while len(self._threads) < STREAMS:
            thread = threading.Thread(target=self._serve, name="ckptlib-serve", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise ObjectUnreadable(
                    f"rank {self._link.global_rank(self._link.rank)} cannot read out to others what its host has: "
                    f"{error}. See ulimit -u, and pids.max of the container's cgroup"
                ) from error
            self._threads.append(thread)

    def _serve(self) -> None:
        request = memoryview(bytearray(_REQUEST.size))
        try:
            while True:
                asker = self._link.recv_request(request)
                number, at, nbytes, stream = _REQUEST.unpack(request)
                if number == _DONE:
                    return
                self._answer(asker, number, at, nbytes, stream)
        except AgreementFailed as error:
            log.error("a thread that reads out to other ranks ends: %s", error)

    def _answer(self, asker: int, number: int, at: int, nbytes: int, stream: int) -> None:
        """Answers a request. Survives an asker that is gone, or asks for what cannot be answered: others ask next."""
        who = self._link.global_rank(asker)
        if not 0 < nbytes <= PIECE_BYTES or stream >= STREAMS:
            log.error("rank %d asks for %d bytes in stream %d, expected 1 to %d", who, nbytes, stream, PIECE_BYTES)
            return
        data, why = self._read_out(asker, number, at, nbytes)
        if why:
            log.error("refused a request of rank %d: %s", who, why)
        text = why.encode()[:507]
        try:
            self._link.answer(asker, [data, memoryview(_VERDICT.pack(not why, len(text), text))], stream)
        except AgreementFailed as error:
            log.error("%s", error)

    def _read_out(self, asker: int, number: int, at: int, nbytes: int) -> tuple[memoryview, str]:
        """Returns the requested bytes; or zeros, and why."""
        try:
            found = self._offered(asker, number)
            data = found.view(at, nbytes)
            if len(data) == nbytes and at + nbytes <= found.end:  # it may have grown, or been cut, since it was mapped
                return data, ""
            why = f"{CorruptData.__name__}: {found.where}: [{at}:+{nbytes}] is past its end, {found.end:,}"
        except Exception as error:  # of any kind, such as MemoryError: whoever asks would wait for its time-out
            why = f"{type(error).__name__}: {error}"
        return self._zeros[:nbytes], why

    def _offered(self, asker: int, number: int) -> Offered:
        offers = self._offers.get(asker, [])
        if number >= len(offers):
            raise FormatError(f"rank {self._link.global_rank(asker)} asks for offer {number}, of {len(offers)}")
        return self._open(offers[number])

    def close(self, together: bool) -> None:
        """Ends the exchange. `together`: whether all ranks come here, having agreed that none reads any more. If not,
        those that read from this rank are told at once. Threads that wait for a request then are left, and so is the
        link, which would be closed under them; so are they if the rank that was the first to ask is gone."""
        if together:
            self._send_done()
            deadline = time.monotonic() + DONE_WITHIN_S
            for thread in self._threads:
                thread.join(max(deadline - time.monotonic(), 0.0))
        else:
            self._link.cut()
        if not any(thread.is_alive() for thread in self._threads):
            self._link.close()

    def _send_done(self) -> None:
        """Tells the threads of the ranks that this one was the first to ask that there are no more requests."""
        word = memoryview(bytearray(_REQUEST.pack(_DONE, 0, 0, 0)))
        servers = [server for server, asker in self._first_askers.items() if asker == self._link.rank]
        try:
            sent = [self._link.begin_request(server, word) for server in servers for _ in range(STREAMS)]
            for _ in range(STREAMS - len(self._threads) if self._offers else 0):  # for threads that did not start
                self._link.recv_request(memoryview(bytearray(_REQUEST.size)))
            for wait in sent:
                wait()
        except AgreementFailed as error:
            log.warning("%s", error)


class Remote:
    """Another rank that offers something to this one. Any thread may use it."""

    def __init__(self, link: Link, frm: int, timeout: timedelta) -> None:
        """`timeout`: how long to wait for a free stream."""
        self._link = link
        self._frm = frm
        self._timeout = timeout
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        self._num_offers = 0
        self._lock = threading.Lock()
        self.nbytes_received = 0
        for stream in range(STREAMS):
            self._free.put(stream)

    def next_offer(self) -> RemoteBytes:
        """Returns the next one of its offers, in the order in which they were added."""
        self._num_offers += 1
        return RemoteBytes(self, self._num_offers - 1, self._link.global_rank(self._frm))

    def read(self, number: int, at: int, buffer: memoryview) -> None:
        """Fills `buffer`, of at most PIECE_BYTES.

        Raises one of UNUSABLE with the server's reason why it cannot; AgreementFailed, from then on always and at
        once: gloo has closed the connection.
        """
        try:
            stream = self._free.get(timeout=self._timeout.total_seconds())
        except queue.Empty:
            raise AgreementFailed(
                f"rank {self._link.global_rank(self._frm)} did not answer {STREAMS} requests within "
                f"{self._timeout.total_seconds():.0f} s"
            ) from None
        try:
            self._read(stream, number, at, buffer)
        finally:
            self._free.put(stream)

    def _read(self, stream: int, number: int, at: int, buffer: memoryview) -> None:
        verdict = bytearray(_VERDICT.size)
        request = memoryview(_REQUEST.pack(number, at, len(buffer), stream))
        self._link.ask(self._frm, request, [buffer, memoryview(verdict)], stream)
        good, length, text = _VERDICT.unpack(verdict)
        if not good:
            name, _, reason = text[:length].decode(errors="replace").partition(": ")
            kind = _SAID.get(name, ObjectUnreadable)  # of another class, all that is known is that it failed
            raise kind(f"rank {self._link.global_rank(self._frm)} says: {reason}")
        with self._lock:
            self.nbytes_received += len(buffer)


class RemoteBytes:
    """Bytes that another rank offers. Any thread may use it."""

    def __init__(self, remote: Remote, number: int, server: int) -> None:
        self._remote, self._number = remote, number
        self.server = server
        """The rank that offers them, in the job's world."""

    def read_at(self, at: int, buffer: memoryview) -> None:
        """Fills `buffer`. Raises as `Remote.read` does."""
        for first in range(0, len(buffer), PIECE_BYTES):
            self._remote.read(self._number, at + first, buffer[first : first + PIECE_BYTES])


class RemoteSlot(ReadableSlot):
    """A slot that another rank offers. Any thread may use it."""

    def __init__(self, there: RemoteBytes, found: Found) -> None:
        self.where = f"{found.path} on rank {there.server}"
        self._there = there
        self._body_nbytes = found.body_nbytes

    @property
    @override
    def capacity(self) -> int:
        return self._body_nbytes

    @property
    @override
    def end(self) -> int:
        """A bound on the end, since the path is the other host's; offsets far beyond the slot are refused."""
        return PAGE_BYTES + self._body_nbytes + MAX_DOCUMENTS_BYTES

    @override
    def read_at(self, at: int, buffer: memoryview) -> None:
        self._there.read_at(at, buffer)

    @override
    def view(self, at: int, nbytes: int) -> memoryview:
        buffer = memoryview(bytearray(nbytes))
        self.read_at(at, buffer)
        return buffer
