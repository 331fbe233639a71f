"""A slot on another host, or a share on its disk, read by ranged requests over the Link: only the requested bytes
travel, straight to their place.

    asker                                       server
    number of an offer, first byte, bytes  -->  offered to this asker, and not past its end?
    the reader's own buffer                <--  the bytes, out of a slot's memory or from a disk; or as many zeros
    verdict                                <--  good, or why they are zeros

Both know the offers, from the plan on which all ranks agreed; they are numbered in its order. A few streams for each
pair of ranks, so that a transfer goes on while a reader checks what came; one request under way in each. A server
thread waits for its asker until that says that it is done, or is gone: a time-out would close the links to all others.

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
from ckptlib.errors import AgreementFailed, CkptError, CorruptData, FormatError, NewerFormat, ObjectUnreadable
from ckptlib.pages import PAGE_BYTES
from ckptlib.peers.transfer import MAX_DOCUMENTS_BYTES
from ckptlib.ranks.link import Link
from ckptlib.recovery.inventory import Found
from ckptlib.slots.readable import ReadableSlot
from ckptlib.stores.io_limits import RUN_BYTES, IoLimits

log = logging.getLogger(__name__)

STREAMS = 4
"""For each pair of an asker and a server."""

PIECE_BYTES = 64 * 1024 * 1024
"""The most that one request asks for; a larger request is not answered."""

GATHERED = IoLimits(most=RUN_BYTES // 2, direct_from=RUN_BYTES // 2, threads=STREAMS)
"""Of what is on other hosts: tensors of a few megabytes come several at a time, since each message costs gloo as much
CPU as a copy of some megabytes. Their buffers are fresh memory: 0.5 GB in tensors of 3.3 MB took 0.60 s with eight of
16 MiB, 0.47 with four, and 0.40 with four of 8 MiB."""

_REQUEST = struct.Struct("<QQQ")
"""Which offer, the first byte, how many."""

_DONE = 2**64 - 1
"""Instead of an offer: no more requests in this stream."""

_VERDICT = struct.Struct("<?I507s")
"""Whether the bytes are the slot's; where they are not, why: so many bytes of UTF-8, with the error's class."""

_SAID = {cls.__name__: cls for cls in (*UNUSABLE, NewerFormat)}
"""The classes that are raised where a server says so: a step fares as if this rank had read it itself."""


T = TypeVar("T", bound=Hashable)
"""What is offered, as all ranks know it."""


class Offered(Protocol):
    """Bytes that a rank reads out, from the first up to `end`. From any thread."""

    where: str
    """For people."""

    @property
    def end(self) -> int: ...

    def view(self, at: int, nbytes: int) -> memoryview:
        """So many bytes from this one on; fewer where it ends. Raises CkptError."""


class Exchange(Generic[T]):
    """The reading out between ranks: both ends of it on this rank. Main thread; its own threads serve."""

    def __init__(self, over: dist.ProcessGroup, timeout: timedelta, open_here: Callable[[T], Offered]) -> None:
        """Collective over `over`. `open_here`: of this host; from any thread. Raises AgreementFailed."""
        self._link = Link(over, timeout)
        self._timeout = timeout
        self._open = open_here
        self._offers: dict[int, list[T]] = {}
        """By asker."""
        self._threads: list[threading.Thread] = []
        self._remotes: dict[int, Remote] = {}
        """By server."""

    @property
    def nbytes_received(self) -> int:
        return sum(remote.nbytes_received for remote in self._remotes.values())

    def add(self, moves: Iterable[tuple[T, int, int]]) -> dict[T, RemoteBytes]:
        """`moves`: what, who reads it out from now on, and to whom. Returns what others read out to this rank. All
        ranks add the same."""
        added = {}
        for what, sender, receiver in moves:
            if sender == self._link.rank:
                self._offer(receiver, what)
            if receiver == self._link.rank:
                if sender not in self._remotes:
                    self._remotes[sender] = Remote(self._link, sender, self._timeout)
                added[what] = self._remotes[sender].next_offer()
        return added

    def _offer(self, to: int, what: T) -> None:
        known = to in self._offers
        self._offers.setdefault(to, []).append(what)
        for stream in () if known else range(STREAMS):
            thread = threading.Thread(target=self._serve, args=(to, stream), name=f"ckptlib-serve-{to}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, to: int, stream: int) -> None:
        try:
            serve(self._link, to, stream, lambda number: self._offered(to, number))
        except (AgreementFailed, FormatError) as error:
            log.error("this rank reads out no more to another rank: %s", error)

    def _offered(self, to: int, number: int) -> Offered:
        offers = self._offers[to]
        if number >= len(offers):
            raise FormatError(f"rank {self._link.global_rank(to)} asks for offer {number}, of {len(offers)}")
        return self._open(offers[number])

    def close(self) -> None:
        """Returns when the ranks that read here are done, too, or are gone. When this one reads no more."""
        for remote in self._remotes.values():
            remote.close()
        deadline = time.monotonic() + self._timeout.total_seconds()
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("ranks that read from this rank have neither finished nor disconnected")
            return  # the link must not be closed under them
        self._link.close()


def serve(link: Link, to: int, stream: int, offered: Callable[[int], Offered]) -> None:
    """Answers the requests of one stream until the asker is done.

    `offered`: that of a number; raises CkptError when there is none that can be read. Raises AgreementFailed
    when the asker is gone, FormatError for a request that cannot be answered.
    """
    request = memoryview(bytearray(_REQUEST.size))
    while True:
        link.recv_request(to, request, stream)
        number, at, nbytes = _REQUEST.unpack(request)
        if number == _DONE:
            return
        if not 0 < nbytes <= PIECE_BYTES:
            raise FormatError(f"rank {link.global_rank(to)} asks for {nbytes:,} bytes, expected 1 to {PIECE_BYTES:,}")
        data, why = _read_out(offered, number, at, nbytes)
        if why:
            log.error("refused a request of rank %d: %s", link.global_rank(to), why)
        text = why.encode()[:507]
        link.answer(to, [data, memoryview(_VERDICT.pack(not why, len(text), text))], stream)


def _read_out(offered: Callable[[int], Offered], number: int, at: int, nbytes: int) -> tuple[memoryview, str]:
    """The requested bytes; or zeros, and why."""
    try:
        found = offered(number)
        data = found.view(at, nbytes)
        if len(data) == nbytes and at + nbytes <= found.end:  # it may have grown, or been cut, since it was mapped
            return data, ""
        why = f"{CorruptData.__name__}: {found.where}: [{at}:+{nbytes}] is past its end, {found.end:,}"
    except CkptError as error:
        why = f"{type(error).__name__}: {error}"
    return memoryview(bytes(nbytes)), why


class Remote:
    """Another rank that offers something to this one. From any thread."""

    def __init__(self, link: Link, frm: int, timeout: timedelta) -> None:
        """`timeout`: for a stream to become free."""
        self._link = link
        self._frm = frm
        self._timeout = timeout
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        self._num_offers = 0
        self._lock = threading.Lock()
        self._failure: AgreementFailed | None = None
        """Why this rank is asked for nothing any more."""
        self.nbytes_received = 0
        for stream in range(STREAMS):
            self._free.put(stream)

    def next_offer(self) -> RemoteBytes:
        """Of what it offers: what was added after all that was asked for here."""
        self._num_offers += 1
        return RemoteBytes(self, self._num_offers - 1, self._link.global_rank(self._frm))

    def read(self, number: int, at: int, buffer: memoryview) -> None:
        """Fills `buffer`, PIECE_BYTES at most.

        Raises one of UNUSABLE with the server's reason why it cannot; AgreementFailed, from then on always.
        """
        try:
            stream = self._free.get(timeout=self._timeout.total_seconds())
        except queue.Empty:
            raise AgreementFailed(
                f"rank {self._link.global_rank(self._frm)} did not answer {STREAMS} requests within "
                f"{self._timeout.total_seconds():.0f} s"
            ) from None
        try:
            if self._failure is not None:
                raise self._failure
            self._read(stream, number, at, buffer)
        except AgreementFailed as error:
            self._failure = error
            raise
        finally:
            self._free.put(stream)

    def _read(self, stream: int, number: int, at: int, buffer: memoryview) -> None:
        verdict = bytearray(_VERDICT.size)
        request = memoryview(_REQUEST.pack(number, at, len(buffer)))
        self._link.ask(self._frm, request, [buffer, memoryview(verdict)], stream)
        good, length, text = _VERDICT.unpack(verdict)
        if not good:
            name, _, reason = text[:length].decode(errors="replace").partition(": ")
            kind = _SAID.get(name, ObjectUnreadable)  # of another one nothing is known but that
            raise kind(f"rank {self._link.global_rank(self._frm)} says: {reason}")
        with self._lock:
            self.nbytes_received += len(buffer)

    def close(self) -> None:
        """Tells the server that this rank is done; it may be gone."""
        try:
            for stream in range(STREAMS) if self._failure is None else ():
                self._link.ask(self._frm, memoryview(_REQUEST.pack(_DONE, 0, 0)), [], stream)
        except AgreementFailed as error:
            log.warning("%s", error)


class RemoteBytes:
    """Bytes that another rank offers. From any thread."""

    def __init__(self, remote: Remote, number: int, server: int) -> None:
        self._remote, self._number = remote, number
        self.server = server
        """In the job's world."""

    def read_at(self, at: int, buffer: memoryview) -> None:
        """Fills `buffer`. Raises as `Remote.read` does."""
        for first in range(0, len(buffer), PIECE_BYTES):
            self._remote.read(self._number, at + first, buffer[first : first + PIECE_BYTES])


class RemoteSlot(ReadableSlot):
    """A slot that another rank offers. From any thread."""

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
        """The path is the other host's; offsets far beyond the slot are refused."""
        return PAGE_BYTES + self._body_nbytes + MAX_DOCUMENTS_BYTES

    @override
    def read_at(self, at: int, buffer: memoryview) -> None:
        self._there.read_at(at, buffer)

    @override
    def view(self, at: int, nbytes: int) -> memoryview:
        buffer = memoryview(bytearray(nbytes))
        self.read_at(at, buffer)
        return buffer
