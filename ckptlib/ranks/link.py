"""The link between ranks: bytes from the memory of one into that of another, over gloo connections of their own.

Point-to-point only, so that several threads may use it at once, and not the main one alone. Knows nothing of what the
bytes mean.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from ckptlib.errors import AgreementFailed
from ckptlib.ranks.connections import connect, disconnect

CHUNK_BYTES = 64 * 1024 * 1024
"""Bytes per message. Each costs a few wake-ups of both ranks: over loopback, on two cores, messages of 16, 32 and 64
MiB ran at 0.74, 0.90 and 0.97 of the speed of a single one for all (median of 8)."""

IN_FLIGHT = 2
"""Messages under way in each stream: one is on its way while the one before is being waited for."""

REQUEST_WITHIN = timedelta(days=1)
"""How long the next request may take to come: longer than any restore."""

_DATA, _END, _ANSWER, _REQUEST = range(4)
"""What goes with a message: a byte behind it, and one back when it is there. Requests of all tags come in one line.

Ranks wait for these bytes, not for the message. When a connection closes, gloo (torch 2.13) does not tell a rank that
waits for a message of which a part has gone through: in 10 of 12 kills in the middle of a body the other rank waited
until its time-out.
"""

_NOTHING = 2**31 - 1
"""Tag of no message."""


class Link:
    """Ranks 0..size-1 of a process group, as in `Group`.

    Messages from one rank to another that have the same `tag` arrive in the order in which they were sent; those of
    different tags or in different directions do not wait for one another. Sender and receiver give buffers of the same
    size. Buffers are used where they are, and are the caller's again on return.

    Every wait for a message of at most CHUNK_BYTES has the link's time-out, but for the wait for a request. After a
    failure gloo has closed the connection to that peer for good; after a time-out, those to all peers.
    """

    def __init__(self, over: dist.ProcessGroup, timeout: timedelta, connect_within: timedelta | None = None) -> None:
        """Connects. Collective over `over`, from any thread, one at a time. `connect_within`: None stands for
        `timeout`. Raises AgreementFailed."""
        self._ranks = dist.get_process_group_ranks(over)
        self._timeout = timeout
        self.rank = over.rank()
        self.size = over.size()
        self.broken = False
        """Whether anything has failed: some or all peers can no longer be reached."""
        self._gloo = connect(over, connect_within or timeout)

    def global_rank(self, rank: int) -> int:
        """Returns the rank in the job's world, by which people know it."""
        return self._ranks[rank]

    def send(self, to: int, buffer: memoryview, tag: int) -> None:
        """Returns when the peer has the bytes. Raises AgreementFailed."""
        for _ in self._stream(self._begin_send, to, buffer, tag, "sending to"):
            pass

    def recv(self, frm: int, buffer: memoryview, tag: int) -> None:
        """Fills the buffer. Raises AgreementFailed, and leaves anything in the buffer then."""
        for _ in self.arriving(frm, buffer, tag):
            pass

    def arriving(self, frm: int, buffer: memoryview, tag: int) -> Iterator[int]:
        """Does what `recv` does; yields the number of bytes that are there, each time that it has grown.

        More are on their way then. It must be exhausted: nothing else can be received with this tag before.
        """
        assert not buffer.readonly
        return self._stream(self._begin_recv, frm, buffer, tag, "receiving from")

    def begin_send(self, to: int, buffer: memoryview, tag: int) -> Callable[[], None]:
        """Begins what `send` does, with at most CHUNK_BYTES; returns a function that waits until the peer has them.

        Several may be under way; they are waited for in the order in which they were begun. Both raise AgreementFailed.
        """
        with self._reaching(to, "sending to"):
            return partial(self._end_one, to, "sending to", self._begin_send(to, _tensor(buffer), 4 * tag), buffer)

    def begin_recv(self, frm: int, buffer: memoryview, tag: int) -> Callable[[], None]:
        """Begins what `recv` does, in the way of `begin_send`."""
        with self._reaching(frm, "receiving from"):
            return partial(
                self._end_one, frm, "receiving from", self._begin_recv(frm, _tensor(buffer), 4 * tag), buffer
            )

    def _end_one(self, peer: int, what: str, wait: Callable[[], None], buffer: memoryview) -> None:
        """Waits for one message. `buffer`: kept until then."""
        with self._reaching(peer, what):
            wait()

    def ask(self, peer: int, request: memoryview, answer: Sequence[memoryview], tag: int) -> None:
        """Sends a request to the peer that waits in `recv_request`, and fills the buffers with its answer.

        The last buffer is small, and this end waits for that one: see _DATA. Nor does gloo tell a rank that its message
        will not be sent, if it stands behind another one when the connection closes. The rest has CHUNK_BYTES at most.
        One request at a time with each tag. Raises AgreementFailed, and leaves anything in the buffers then.
        """
        with self._reaching(peer, "asking"):
            coming = [self._gloo.recv([_tensor(buffer)], peer, 4 * tag + _DATA) for buffer in answer]
            sent = self._gloo.send([_tensor(request)], peer, _REQUEST)
            self._wait(*reversed(coming), sent)

    def begin_request(self, peer: int, request: memoryview) -> Callable[[], None]:
        """Sends a request that is not answered. Returns a function that waits until the peer has it; see
        `begin_send`."""
        with self._reaching(peer, "asking"):
            sent = self._gloo.send([_tensor(request)], peer, _REQUEST)
            return partial(self._end_one, peer, "asking", lambda: self._wait(sent), request)

    def recv_request(self, request: memoryview) -> int:
        """Waits for the next request, however long nobody has anything to ask for, and returns the rank that sent it.

        Nobody's death ends the wait. Raises AgreementFailed if a peer is lost before it has sent all of a request. gloo
        offers that one again to whoever asks for the next, and no other peer's. So this closes the connections to all
        peers: they would wait until their time-out.
        """
        try:
            work = self._gloo.recv_anysource([_tensor(request)], _REQUEST)
            work.wait(REQUEST_WITHIN)
        except RuntimeError as error:
            self.cut()
            raise AgreementFailed(f"waiting for a request failed on rank {self._ranks[self.rank]}: {error}") from error
        return int(work._source_rank())

    def cut(self) -> None:
        """Closes the connections to all peers. Whoever waits for the answer to a request, at either end, raises
        AgreementFailed; but a rank that waits for a request waits on, and one that answers may wait for the time-out.
        Any thread may call it."""
        self.broken = True
        with suppress(RuntimeError):  # a time-out: the only way to close them that each torch has
            self._gloo.recv_anysource([_byte()], _NOTHING).wait(timedelta(milliseconds=1))

    def answer(self, to: int, answer: Sequence[memoryview], tag: int) -> None:
        """Sends the answer to a request. Raises AgreementFailed."""
        with self._reaching(to, "answering"):
            self._wait(*[self._gloo.send([_tensor(buffer)], to, 4 * tag + _DATA) for buffer in answer])

    def give_up(self, peer: int, why: str) -> AgreementFailed:
        """Returns the error for a peer whose next message can no longer be told: all connect anew."""
        self.cut()
        return AgreementFailed(
            f"the link to rank {self._ranks[peer]} is given up on rank {self._ranks[self.rank]}: {why}"
        )

    def _stream(self, begin: Begin, peer: int, buffer: memoryview, tag: int, what: str) -> Iterator[int]:
        under_way: deque[tuple[Callable[[], None], int]] = deque()
        with self._reaching(peer, what):
            for at in range(0, len(buffer), CHUNK_BYTES):
                if len(under_way) == IN_FLIGHT:
                    yield _end(*under_way.popleft())
                end = min(at + CHUNK_BYTES, len(buffer))
                under_way.append((begin(peer, _tensor(buffer[at:end]), 4 * tag), end))
            while under_way:
                yield _end(*under_way.popleft())

    @contextmanager
    def _reaching(self, peer: int, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what gloo raises for a time-out and for a lost peer alike
            self.broken = True
            raise AgreementFailed(
                f"{what} rank {self._ranks[peer]} failed on rank {self._ranks[self.rank]}: it is gone, or did not "
                f"answer within {self._timeout.total_seconds():.0f} s: {error}"
            ) from error

    def _begin_send(self, to: int, data: torch.Tensor, tag: int) -> Callable[[], None]:
        answered = self._gloo.recv([_byte()], to, tag + _ANSWER)
        sent = self._gloo.send([data], to, tag + _DATA), self._gloo.send([_byte()], to, tag + _END)
        return lambda: self._wait(answered, *sent)

    def _begin_recv(self, frm: int, data: torch.Tensor, tag: int) -> Callable[[], None]:
        there, ended = self._gloo.recv([data], frm, tag + _DATA), self._gloo.recv([_byte()], frm, tag + _END)

        def wait() -> None:
            self._wait(ended, there)
            self._wait(self._gloo.send([_byte()], frm, tag + _ANSWER))

        return wait

    def _wait(self, *works: dist.Work) -> None:
        for work in works:
            work.wait(self._timeout)

    def close(self) -> None:
        """Closes the connections. Ends no wait: call it when no thread is in `send` or `recv` any more."""
        disconnect(self._gloo)


Begin = Callable[[int, torch.Tensor, int], Callable[[], None]]
"""Takes (peer, data, tag); returns a function that waits for it."""


def _end(wait: Callable[[], None], end: int) -> int:
    wait()
    return end


def _byte() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


def _tensor(buffer: memoryview) -> torch.Tensor:
    """Returns the same memory as a tensor. It does not keep read-only memory alive, and must not be written to then.

    torch knows no read-only memory, and warns of it.
    """
    if not buffer.readonly:
        return torch.frombuffer(buffer, dtype=torch.uint8)
    address = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
    return torch.frombuffer((ctypes.c_ubyte * len(buffer)).from_address(address), dtype=torch.uint8)
