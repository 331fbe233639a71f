"""The proxy's thread: it listens on loopback, and lends each connection to exchanges."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TextIO, TypeVar
from urllib.parse import urlsplit

from typing_extensions import Self

from ckptlib.stores.fault_proxy.exchange import Cut, Exchange, Hang, Reset
from ckptlib.stores.fault_proxy.link import Link
from ckptlib.stores.fault_proxy.ops import op_of
from ckptlib.stores.fault_proxy.peer import ClientGone, Peer, ServerGone
from ckptlib.stores.fault_proxy.record import Request
from ckptlib.stores.fault_proxy.rules import Rule, Rules
from ckptlib.stores.fault_proxy.wire import BUFFER_NBYTES, Head, request_framing

_log = logging.getLogger(__name__)

T = TypeVar("T")

_HOST = "127.0.0.1"
_BACKLOG = 512
_LOOK_S = 0.05
"""How often the file of rules is looked at while no request comes."""
_STOP_TIMEOUT_S = 10.0


class FaultProxy:
    """Passes requests on to `upstream`, but for those that rules break; see `ckptlib.stores.fault_proxy`.

    Works while its context is entered. `rules_path` is a JSON file of rules, read again whenever it changes; `log_path`
    is given a line of JSON for each request that ended. `port` 0 is any free one. Its methods may be called from any
    thread.
    """

    def __init__(
        self,
        upstream: str,
        rules: Sequence[Rule] = (),
        *,
        port: int = 0,
        rules_path: str | os.PathLike[str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
    ) -> None:
        parts = urlsplit(upstream)
        if parts.scheme != "http" or parts.hostname is None or parts.path.strip("/"):
            raise ValueError(f"{upstream}: expected http://HOST:PORT")
        if rules and rules_path is not None:
            raise ValueError("expected rules or the file of rules, not both")
        self._upstream = (parts.hostname, parts.port or 80)
        self._port = port
        self._rules = Rules(rules)
        self._rules_path = None if rules_path is None else Path(rules_path)
        self._rules_stamp: tuple[int, int, int] | None = None
        self._log_path = log_path
        self._log: TextIO | None = None
        self._requests: list[Request] = []
        self._links: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        """The proxy's own URL, which clients take for the server's."""
        return f"http://{_HOST}:{self._port}"

    @property
    def requests(self) -> list[Request]:
        """Every request so far, as it stands now, in the order in which they came.

        One that was answered a moment ago may still count as under way.
        """
        return [dataclasses.replace(request) for request in self._requests]

    def rules(self, rules: Sequence[Rule]) -> None:
        """Replaces all rules. Requests that come after this returns meet the new ones; counts begin anew."""
        self._run(self._follow(Rules(rules)))

    def __enter__(self) -> Self:
        if self._log_path is not None:
            self._log = open(self._log_path, "a", buffering=1, encoding="utf-8")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ckptlib fault proxy", daemon=True)
        self._thread.start()
        try:
            self._run(self._start())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._thread is not None
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        self._loop.close()
        self._loop = self._thread = None
        if self._log is not None:
            self._log.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise ValueError("the fault proxy works only while its context is entered")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(_STOP_TIMEOUT_S)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"the fault proxy's thread did not answer within {_STOP_TIMEOUT_S:.0f} s") from None

    # -- all below runs in the thread

    async def _start(self) -> None:
        if self._rules_path is None:
            await self._follow(self._rules)
        else:
            await self._reread_rules()
            self._spawn(self._watch_rules())
        if self._listener is None and not self._rules.is_down:
            await self._listen()

    async def _stop(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # sockets are closed in the turn of the loop behind the one that resets them

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _follow(self, rules: Rules) -> None:
        self._rules = rules
        if rules.is_down and self._listener is not None:
            self._listener.close()
            self._listener = None
        if rules.is_down:
            for link in self._links:
                link.reset()
        elif self._listener is None:
            await self._listen()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(
            self._accept, _HOST, self._port, limit=BUFFER_NBYTES, backlog=_BACKLOG
        )
        self._port = self._listener.sockets[0].getsockname()[1]

    async def _watch_rules(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self._reread_rules()

    async def _reread_rules(self) -> None:
        """A file that is not there holds no rules; one that cannot be read, or is half written, changes nothing."""
        if self._rules_path is None:
            return
        try:
            status = self._rules_path.stat()
        except FileNotFoundError:
            stamp = None
        else:
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
        if stamp == self._rules_stamp:
            return
        self._rules_stamp = stamp
        try:
            rules = Rules(json.loads(self._rules_path.read_text(encoding="utf-8")) if stamp else [])
        except (OSError, ValueError, TypeError) as error:
            _log.warning("%s: the rules stay as they were: %s", self._rules_path, error)
            return
        await self._follow(rules)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(Peer(reader, writer, ClientGone), self._upstream)
        self._links.add(link)
        self._spawn(self._serve(link))

    async def _serve(self, link: Link) -> None:
        """All requests of a connection, one after the other."""
        try:
            while head := await link.next_head():
                await self._reread_rules()
                if not await self._exchange(head, link):
                    break
            link.close()
        except (Cut, _InOrder):
            link.close()
        except (Reset, ClientGone, ServerGone):
            pass
        finally:
            link.drop_server()
            if not link.client.is_closing:
                link.client.reset()
            self._links.discard(link)

    async def _exchange(self, head: Head, link: Link) -> bool:
        method, target, _ = head.words
        what = head.fields.get(b"range")
        op = op_of(method, target, head.fields)
        request = Request(op, method, target, time.time(), None if what is None else what.decode("latin-1"))
        self._requests.append(request)
        start = time.monotonic()
        try:
            with link.client.errors():
                nbytes_up = request_framing(head).nbytes
            fault = self._rules.next_fault(f"{op} {target}", nbytes_up)
            return await Exchange(head, link, fault, request).run()
        except Hang:
            link.drop_server()
            await link.client.leaves()
            raise Reset from None
        except (ClientGone, ServerGone) as error:
            request.fault = request.fault or str(error)
            if isinstance(error, ServerGone) and isinstance(error.__cause__, EOFError):
                raise _InOrder from error
            raise
        finally:
            request.seconds = time.monotonic() - start
            if self._log is not None:
                self._log.write(json.dumps(dataclasses.asdict(request)) + "\n")


class _InOrder(Exception):
    """The server closed its connection in order, so the client's is closed likewise."""
