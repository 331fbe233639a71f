"""One request and its answer, on their way through the proxy, and their faults."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from ckptlib.stores.fault_proxy.link import Link, Pace
from ckptlib.stores.fault_proxy.ops import error_answer
from ckptlib.stores.fault_proxy.peer import Peer, ServerGone
from ckptlib.stores.fault_proxy.record import Request
from ckptlib.stores.fault_proxy.rules import BODY_DOWN, BODY_UP, ERRORS, Fault
from ckptlib.stores.fault_proxy.wire import (
    BUFFER_NBYTES,
    Framing,
    Head,
    answer_framing,
    pieces,
    read_away,
    read_head,
    request_framing,
)

_PACE_S = 0.05
"""With a limit of bandwidth, a piece takes no longer: bytes come evenly."""


class Reset(Exception):
    """The connections are to be reset."""


class Hang(Exception):
    """The client is to wait for ever."""


class Cut(Exception):
    """The client's connection is to be closed in order, now."""


class Exchange:
    """`run` says whether another request may follow on the connection."""

    def __init__(self, head: Head, link: Link, fault: Fault, request: Request) -> None:
        self._head, self._link, self._fault, self._request = head, link, fault, request

    async def run(self) -> bool:
        kind = self._fault.kind
        if self._fault.latency_s:
            await self._pause(self._fault.latency_s)
        if kind == "refuse":
            self._note()
            raise Reset
        if kind == "blackhole":
            await self._swallow()
        if kind in ERRORS:
            return await self._refuse_with(int(kind))
        server = await self._link.connected()
        await server.write(self._head.raw)
        return await self._pass(server)

    async def _pass(self, server: Peer) -> bool:
        """Both directions at once: the server may answer before it has read the body, or ask for it (100 Continue)."""
        up, down = asyncio.create_task(self._up(server)), asyncio.create_task(self._down(server))
        async with _cancelled_in_the_end({up, down}):
            waiting = {up, down}
            while down in waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            if not up.done():
                await self._read_on(server, up)
            return up.done() and up.result() and down.result()

    async def _read_on(self, server: Peer, up: asyncio.Task[bool]) -> None:
        """After an answer that came early: until the server has the rest of the body, or closes the connection."""
        ended = asyncio.create_task(_ends(server))
        async with _cancelled_in_the_end({ended}):
            await asyncio.wait({up, ended}, return_when=asyncio.FIRST_COMPLETED)

    async def _up(self, server: Peer) -> bool:
        """Whether the whole body went to the server; when that no longer reads, its answer is what counts."""
        fault = self._fault if self._fault.kind in BODY_UP else Fault()
        try:
            await self._pump(
                self._link.client, server, request_framing(self._head), fault, self._link.pace_up, self._sent
            )
        except ServerGone:
            return False
        return True

    async def _down(self, server: Peer) -> bool:
        """Whether the answer came whole and the connection may be used again."""
        client, kind = self._link.client, self._fault.kind
        head = await self._answer_head(server)
        while head.words[1].startswith("1"):  # 100 Continue, 103 Early Hints
            await client.write(head.raw)
            head = await self._answer_head(server)
        with server.errors():
            self._request.status = int(head.words[1])
            framing = answer_framing(head, self._head.words[0])
        if kind in ("hang_reply", "lost_reply"):
            self._note()
            if self._fault.seconds is not None:
                await self._pause(self._fault.seconds)
            else:
                with server.errors():
                    await read_away(server.reader, framing)
                raise Hang if kind == "hang_reply" else Reset
        await client.write(head.raw)
        fault = self._fault if kind in BODY_DOWN else Fault()
        await self._pump(server, client, framing, fault, self._link.pace_down, self._received)
        has_end = framing.is_chunked or framing.nbytes is not None
        return has_end and head.keeps_alive and self._head.keeps_alive

    async def _answer_head(self, server: Peer) -> Head:
        with server.errors():
            head = await read_head(server.reader)
            if head is None:
                raise EOFError("no answer")
            return head

    async def _pump(
        self,
        source: Peer,
        sink: Peer,
        framing: Framing,
        fault: Fault,
        pace: Pace,
        count: Callable[[int], None],
    ) -> None:
        """Passes a body on; the fault strikes at the byte behind its first `after` ones."""
        limit = self._fault.bandwidth
        piece_nbytes = BUFFER_NBYTES if limit is None else min(BUFFER_NBYTES, max(1, int(limit * _PACE_S)))
        total = 0
        with source.errors():
            async with contextlib.aclosing(pieces(source.reader, framing, piece_nbytes)) as found:
                async for piece, is_body in found:
                    data = piece
                    if is_body and fault.kind is not None and total <= fault.after < total + len(piece):
                        data = await self._strike(sink, piece, fault.after - total, count)
                    if is_body:
                        total += len(piece)
                        await pace.wait(len(data), limit)
                        count(len(data))
                    await sink.write(data)

    async def _strike(self, sink: Peer, piece: bytes, num_before: int, count: Callable[[int], None]) -> bytes:
        """The part of a piece that is passed on, if any."""
        self._note()
        kind, seconds = self._fault.kind, self._fault.seconds
        if kind in ("flip_up", "flip_down"):
            return piece[:num_before] + bytes([piece[num_before] ^ 1]) + piece[num_before + 1 :]
        count(num_before)
        await sink.write(piece[:num_before])
        if kind == "truncate":
            raise Cut
        if kind in ("reset_up", "reset_down"):
            raise Reset
        if seconds is None:
            raise Hang
        await self._pause(seconds)
        return piece[num_before:]

    def _sent(self, nbytes: int) -> None:
        self._request.nbytes_up += nbytes

    def _received(self, nbytes: int) -> None:
        self._request.nbytes_down += nbytes

    async def _swallow(self) -> None:
        self._note()
        if b"expect" not in self._head.fields:  # else the client waits before it sends more
            await self._read_away()
        if self._fault.seconds is None:
            raise Hang
        await self._pause(self._fault.seconds)
        raise Reset

    async def _refuse_with(self, status: int) -> bool:
        self._note()
        method, target, _ = self._head.words
        answer = error_answer(status, method, target, self._head.fields)
        waits = b"expect" in self._head.fields  # for leave to send the body, which it does not get
        if not waits:
            await self._read_away()
        await self._link.client.write(answer)
        self._request.status = status
        return not waits and self._head.keeps_alive

    async def _read_away(self) -> None:
        with self._link.client.errors():
            await read_away(self._link.client.reader, request_framing(self._head))

    async def _pause(self, seconds: float) -> None:
        if await self._link.client.leaves(seconds):
            raise Reset

    def _note(self) -> None:
        self._request.fault = self._fault.kind


async def _ends(peer: Peer) -> bool:
    with contextlib.suppress(OSError):
        await peer.reader.read(1)
    return True


@contextlib.asynccontextmanager
async def _cancelled_in_the_end(tasks: set[asyncio.Task[bool]]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
