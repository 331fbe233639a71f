"""Servers of S3 on loopback that answer by a few lines of a test's own."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import ClassVar

from typing_extensions import Self


class Handler(BaseHTTPRequestHandler):
    """Of one request. A test's own has `do_GET` and so on, each of which calls `answer`."""

    protocol_version = "HTTP/1.1"
    fields: ClassVar[Mapping[str, str]] = {}
    """Of all answers."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def answer(self, status: int, body: bytes = b"", **fields: str) -> None:
        """To HEAD, all but the body. `fields`: more of them, with _ for -."""
        self.send_response(status)
        for name, value in {**self.fields, **{name.replace("_", "-"): value for name, value in fields.items()}}.items():
            self.send_header(name, value)
        if status not in (204, 304):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


class Server(ThreadingHTTPServer):
    """It answers while its context is entered."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def options(self, client: str = "s3fs") -> dict[str, object]:
        """For `open_store("s3://bucket/run", ...)`."""
        return {"key": "somebody", "secret": "s3cr3t", "endpoint_url": self.url, "client": client}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()
