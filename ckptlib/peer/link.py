"""The link between ranks: bytes from the memory of one into that of another, over gloo connections of their own.

Point-to-point only, so that it may be used on other threads than the main one, several at once. Knows nothing of
what the bytes mean.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from ckptlib.errors import AgreementFailed
from ckptlib.group import connect

CHUNK_BYTES = 16 * 1024 * 1024
"""Per message. Over loopback 4 to 512 MiB are as fast; smaller ones cost a wake-up each."""

IN_FLIGHT = 2
"""Messages under way in each stream: one is on its way while the one before is being waited for."""

Start = Callable[[list[torch.Tensor], int, int], dist.Work]


class Link:
    """Ranks 0..size-1 of a process group, as in `Group`.

    Messages from one rank to another that have the same `tag` arrive in the order in which they were sent; those of
    different tags or in different directions do not wait for one another. Sender and receiver give buffers of the same
    size. Buffers are used where they are, and are the caller's again on return.

    Every wait for a message of at most CHUNK_BYTES has the link's time-out. After a failure gloo has closed the
    connection to that peer for good, after a time-out those to all peers.
    """

    def __init__(self, over: dist.ProcessGroup, timeout: timedelta) -> None:
        """Collective over `over`, on the main thread. Raises AgreementFailed."""
        self._ranks = dist.get_process_group_ranks(over)
        self._timeout = timeout
        self.rank = over.rank()
        self.size = over.size()
        self.broken = False
        """Whether anything has failed: some or all peers can no longer be reached."""
        self._gloo = connect(over, timeout)

    def global_rank(self, rank: int) -> int:
        """The rank in the job's world, by which people know it."""
        return self._ranks[rank]

    def send(self, to: int, buffer: memoryview, tag: int) -> None:
        """Returns when the peer takes the bytes, or when the kernel does so for it. Raises AgreementFailed."""
        for _ in self._stream(self._gloo.send, to, buffer, tag, "sending to"):
            pass

    def recv(self, frm: int, buffer: memoryview, tag: int) -> None:
        """Fills the buffer. Raises AgreementFailed, with anything in it."""
        for _ in self.arriving(frm, buffer, tag):
            pass

    def arriving(self, frm: int, buffer: memoryview, tag: int) -> Iterator[int]:
        """Like `recv`; gives the number of bytes that are there, each time that it has grown.

        More are on their way then. It must be exhausted: nothing else can be received with this tag before.
        """
        assert not buffer.readonly
        return self._stream(self._gloo.recv, frm, buffer, tag, "receiving from")

    def _stream(self, start: Start, peer: int, buffer: memoryview, tag: int, what: str) -> Iterator[int]:
        under_way: deque[tuple[dist.Work, int]] = deque()
        try:
            for at in range(0, len(buffer), CHUNK_BYTES):
                if len(under_way) == IN_FLIGHT:
                    yield self._finish(*under_way.popleft())
                end = min(at + CHUNK_BYTES, len(buffer))
                under_way.append((start([_tensor(buffer[at:end])], peer, tag), end))
            while under_way:
                yield self._finish(*under_way.popleft())
        except RuntimeError as error:  # what gloo raises for a time-out and for a lost peer alike
            self.broken = True
            raise AgreementFailed(
                f"{what} rank {self._ranks[peer]} failed on rank {self._ranks[self.rank]}: it is gone, or did not "
                f"answer within {self._timeout.total_seconds():.0f} s: {error}"
            ) from error

    def _finish(self, work: dist.Work, end: int) -> int:
        work.wait(self._timeout)
        return end

    def close(self) -> None:
        """Closes the connections. Ends no wait: call it when no thread is in `send` or `recv` any more."""
        self._gloo.shutdown()


def _tensor(buffer: memoryview) -> torch.Tensor:
    """The same memory. Does not keep it alive where it is read-only, and must not be written to then.

    torch knows no read-only memory, and warns of it.
    """
    if not buffer.readonly:
        return torch.frombuffer(buffer, dtype=torch.uint8)
    address = np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0]
    return torch.frombuffer((ctypes.c_ubyte * len(buffer)).from_address(address), dtype=torch.uint8)
