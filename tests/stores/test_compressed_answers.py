"""An object that a proxy compresses on its way is not damaged: an error of the store, which ends a restore."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ckptlib.errors import StoreError
from ckptlib.stores import Store, open_store

DATA = b"data" * 1000


class _Packing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    encoding = ""

    def do_GET(self) -> None:
        body = gzip.compress(DATA) if "gzip" in self.encoding.lower() else DATA
        self.send_response(200)
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
        self.send_header("Content-Encoding", self.encoding)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(client: str, encoding: str) -> Iterator[Store]:
    handler = type("Packing", (_Packing,), {"encoding": encoding})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        options = {"key": "somebody", "secret": "s3cr3t", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        with open_store("s3://bucket/run", {**options, "client": client}) as store:
            yield store
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("encoding", ["gzip", "GZip", "aws-chunked, gzip"])
def test_they_are_told_as_such(store: Store) -> None:
    with pytest.raises(StoreError, match=r"run/p: cannot get: .* encoding .*(?i:gzip).* a proxy in the way") as told:
        store.get("p")
    assert type(told.value) is StoreError


@pytest.mark.parametrize("encoding", ["aws-chunked", "identity"])
def test_some_servers_tell_how_the_request_came(store: Store) -> None:
    assert store.get("p") == DATA
