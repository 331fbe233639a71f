"""A client's connection and the one to the server that belongs to it, as long as both live."""

from __future__ import annotations

import asyncio

from ckptlib.stores.fault_proxy.peer import Peer, ServerGone
from ckptlib.stores.fault_proxy.wire import BUFFER_NBYTES, Head, read_head


class Pace:
    """A limit of bytes per second for one direction of one connection."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def wait(self, nbytes: int, bandwidth: float | None) -> None:
        if bandwidth is not None:
            now = asyncio.get_running_loop().time()
            self._free_at = max(self._free_at, now) + nbytes / bandwidth
            await asyncio.sleep(self._free_at - now)


class Link:
    """A client's connection, and the one to the server that belongs to it."""

    def __init__(self, client: Peer, upstream: tuple[str, int]) -> None:
        self.client = client
        self.server: Peer | None = None
        self.pace_up, self.pace_down = Pace(), Pace()
        self._upstream = upstream

    async def connected(self) -> Peer:
        if self.server is None:
            try:
                reader, writer = await asyncio.open_connection(*self._upstream, limit=BUFFER_NBYTES)
            except OSError as error:
                raise ServerGone("server down") from error
            self.server = Peer(reader, writer, ServerGone)
        return self.server

    def drop_server(self) -> None:
        if self.server is not None:
            self.server.reset()
            self.server = None

    async def next_head(self) -> Head | None:
        """Of the next request; None when either side has closed the connection in order."""
        with self.client.errors():
            if self.server is None:
                return await read_head(self.client.reader)
            head = asyncio.create_task(read_head(self.client.reader))
            ended = asyncio.create_task(self.server.reader.read(1))
            try:
                await asyncio.wait({head, ended}, return_when=asyncio.FIRST_COMPLETED)
                return head.result() if head.done() else None
            finally:
                head.cancel()
                ended.cancel()
                await asyncio.gather(head, ended, return_exceptions=True)

    def reset(self) -> None:
        self.drop_server()
        self.client.reset()

    def close(self) -> None:
        self.drop_server()
        self.client.close()
