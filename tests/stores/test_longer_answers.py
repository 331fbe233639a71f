"""An answer to a range that is longer than the range, as a proxy gives it that packs or adds: an error of the store."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ckptlib.errors import StoreError
from ckptlib.stores import Store, open_store

DATA = bytes(range(100))


class _Longer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = DATA[first : last + 1] + b"and more"
        self._begin(206, len(body), ("Content-Range", f"bytes {first}-{last}/{len(DATA)}"))
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self._begin(200, len(DATA))

    def _begin(self, status: int, nbytes: int, *more: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (
            ("ETag", '"e"'),
            ("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT"),
            ("Content-Length", str(nbytes)),
            *more,
        ):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(params=["s3fs", "obstore"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Longer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        options = {"key": "somebody", "secret": "s3cr3t", "endpoint_url": f"http://127.0.0.1:{server.server_port}"}
        more = {"client": request.param} if request.param == "obstore" else {}
        with open_store("s3://bucket/run", {**options, **more}) as store:
            yield store
        server.shutdown()
        thread.join()


def test_it_is_no_answer(store: Store) -> None:
    with pytest.raises(StoreError, match="run/p: cannot get: expected"):
        store.get("p", 10, 20)
    into = bytearray(20)
    with pytest.raises(StoreError, match="run/p: cannot get: expected"):
        store.get_into("p", 10, memoryview(into))
    assert into in (bytes(20), DATA[10:30])
