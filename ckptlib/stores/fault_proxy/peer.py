"""One end of a connection, which may end in order or be reset."""

from __future__ import annotations

import asyncio
import contextlib
import math
import select
import socket
import struct
from collections.abc import Iterator


class ClientGone(Exception):
    """The client closed the connection too early, or what it sends is no HTTP."""

    what = "client gone"


class ServerGone(Exception):
    """The same of the server; or it could not be reached."""

    what = "server gone"


class Peer:
    """The other side of one connection. Raises `gone` when that breaks."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        gone: type[ClientGone] | type[ServerGone],
    ) -> None:
        self.reader, self._writer, self._gone = reader, writer, gone
        writer.transport.set_write_buffer_limits(high=0)
        self.socket: socket.socket = writer.get_extra_info("socket")
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """The errors of reading from it."""
        try:
            yield
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise self._gone(self._gone.what) from error

    async def write(self, data: bytes) -> None:
        """Returns when the kernel has all of it."""
        with self.errors():
            self._writer.write(data)
            await self._writer.drain()

    @property
    def is_closing(self) -> bool:
        return self._writer.transport.is_closing()

    def close(self) -> None:
        """In order: what was written arrives."""
        self._writer.close()

    def reset(self) -> None:
        if not self.is_closing:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def leaves(self, seconds: float = math.inf) -> bool:
        """Whether the other side closes or resets the connection within this time. Reads nothing of what it sends.

        A close behind more bytes than the kernel buffers is not seen, as no server would see it that stopped reading.
        """
        if self.is_closing:
            return True
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        poll = select.poll()
        # Only Linux tells of a close behind bytes that nobody reads. Elsewhere this waits until the proxy is closed.
        poll.register(self.socket.fileno(), getattr(select, "POLLRDHUP", 0))
        while not self.is_closing and not poll.poll(0):
            left_s = end - loop.time()
            if left_s <= 0:
                return False
            await asyncio.sleep(min(left_s, 0.05))
        return True
