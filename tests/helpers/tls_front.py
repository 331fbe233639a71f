"""TLS in front of a server that speaks HTTP, with a certificate that may be replaced while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from pathlib import Path
from urllib.parse import urlsplit

from typing_extensions import Self

_CHUNK_NBYTES = 1 << 16
_WAIT_S = 150.0


class TlsFront:
    """Passes what comes through TLS on to `upstream`, both ways, in a thread of its own."""

    def __init__(self, upstream: str, certificate: Path) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname, parts.port)
        self._certificate = certificate
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._port = 0

    @property
    def url(self) -> str:
        return f"https://localhost:{self._port}"

    def replace(self, certificate: Path) -> None:
        """From now on; connections that are open are closed, as by a server that is restarted."""
        self._certificate = certificate
        asyncio.run_coroutine_threadsafe(self._restart(), self._loop).result(_WAIT_S)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(_WAIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        self._loop.close()

    async def _restart(self) -> None:
        await self._stop()
        await self._listen()

    async def _listen(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._certificate)
        self._listener = await asyncio.start_server(self._serve, "localhost", self._port, ssl=context)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there, to_server = await asyncio.open_connection(*self._upstream)
            with contextlib.closing(to_server):
                await asyncio.gather(_pass_on(reader, to_server), _pass_on(there, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_NBYTES):
        writer.write(chunk)
        await writer.drain()
    raise ConnectionResetError("one side is gone")
