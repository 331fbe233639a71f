"""The end of an upload that is answered by 200 and no result: the status comes before the parts are joined."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.s3_bucket import PART_NBYTES, scale_limits

from ckptlib.errors import StoreError
from ckptlib.stores import open_store

HEAD, DATA = bytes(4096), bytes(PART_NBYTES + 1)


class Joining(ThreadingHTTPServer):
    """Takes the parts of one upload."""

    daemon_threads = True

    def __init__(self, answer: bytes, joins: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answer, self.joins = answer, joins
        self.parts: dict[str, int] = {}
        self.nbytes: int | None = None
        """Of the object, once there is one."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Joining

    def do_PUT(self) -> None:
        self.server.parts[self.path] = len(self._body())
        self._answer(200)

    def do_POST(self) -> None:
        self._body()
        if "uploads" in self.path:
            self._answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
            return
        if self.server.joins:
            self.server.nbytes = sum(self.server.parts.values())
        self._answer(200, self.server.answer)

    def do_DELETE(self) -> None:
        self._answer(204)

    def do_HEAD(self) -> None:
        nbytes = self.server.nbytes
        self.send_response(404 if nbytes is None else 200)
        self.send_header("ETag", '"opaque"')
        self.send_header("Content-Length", str(nbytes or 0))
        self.end_headers()

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"] or 0))

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("ETag", '"opaque"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Joining]:
    with Joining(*request.param) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def put(server: Joining) -> None:
    options = {"key": "somebody", "secret": "s3cr3t", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
    with open_store("s3://bucket/run", options) as store:
        store.put("p", HEAD, [DATA])


@pytest.mark.parametrize("server", [(b"", False), (b"<html>busy</html>", False)], indirect=True, ids=["cut", "page"])
def test_it_is_no_success_without_an_object(server: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_limits(monkeypatch)
    told = f"run/p: cannot put: .* by 200 without a result, and there is no object of {len(HEAD) + len(DATA)} bytes"
    with pytest.raises(StoreError, match=told):
        put(server)


@pytest.mark.parametrize("server", [(b"", True)], indirect=True, ids=["cut"])
def test_it_is_one_with_the_object(server: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_limits(monkeypatch)
    put(server)
    assert server.nbytes == len(HEAD) + len(DATA)
