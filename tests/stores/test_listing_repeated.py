"""A server whose listings do not lead on: it is told of, and not asked for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ckptlib.errors import StoreError
from ckptlib.stores import open_store

MOST = 20
"""Requests that are answered; a few are enough to see it."""
WHERE = {
    "same token": "<NextContinuationToken>t</NextContinuationToken>",
    "new token": "<NextContinuationToken>{}</NextContinuationToken>",
    "markers": "<NextKeyMarker>k</NextKeyMarker><NextUploadIdMarker>u</NextUploadIdMarker>",
    "marker": "<NextKeyMarker>k</NextKeyMarker>",
    "nothing": "",
}
FOUND = "".join(
    f"<Contents><Key>run/k{number:04}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
    "<ETag>&quot;e&quot;</ETag><Size>1</Size></Contents>"
    for number in range(1000)
)


class Repeating(ThreadingHTTPServer):
    """Whatever page it is asked for, it gives the first one."""

    daemon_threads = True

    def __init__(self, where: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.where, self.num = where, 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Repeating

    def do_GET(self) -> None:
        self.server.num += 1
        kind, found = ("ListMultipartUploads", "") if "uploads" in self.path else ("ListBucket", FOUND)
        where = self.server.where.format(self.server.num)
        body = f"<{kind}Result><IsTruncated>true</IsTruncated>{where}{found}</{kind}Result>".encode()
        self.send_response(200 if self.server.num <= MOST else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Repeating]:
    with Repeating(WHERE[request.param]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def options(server: Repeating) -> dict[str, object]:
    return {"key": "somebody", "secret": "s3cr3t", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize("server", ["same token", "new token"], indirect=True)
def test_objects(server: Repeating, client: str) -> None:
    more = {"client": client} if client == "obstore" else {}
    told = r"s3://bucket/run/k: cannot list: .* or gives a page again; .* update it"
    with open_store("s3://bucket/run", {**options(server), **more}) as store, pytest.raises(StoreError, match=told):
        store.scan("k")


@pytest.mark.parametrize("server", ["markers", "marker", "nothing"], indirect=True)
def test_uploads(server: Repeating) -> None:
    told = r"cannot list uploads: the server says that there is more, but not where"
    with open_store("s3://bucket/run", options(server)) as store, pytest.raises(StoreError, match=told):
        store.clean(time.time(), lambda key: True)
