"""404 of a proxy in front of Azure is an outage, by adlfs: by an absent `ckptlib.json` a job would make a new root."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ckptlib.errors import ObjectNotFound, StoreTimeout
from ckptlib.stores import Store, open_store
from ckptlib.stores import fsspec as fsspec_store

ACCOUNT = "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5"

CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("p"),
    "get a range": lambda store: store.get("p", 5, 10),
    "get into": lambda store: store.get_into("p", 0, memoryview(bytearray(4))),
}


class _Router(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    code = ""

    def _answer(self) -> None:
        self.send_response(404)
        if self.code:
            self.send_header("x-ms-error-code", self.code)
        page = b"<html><body>default backend - 404</body></html>"
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    do_GET = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def store(code: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    pytest.importorskip("adlfs")
    monkeypatch.setattr(fsspec_store, "RETRY_S", 0.2)
    monkeypatch.setattr("ckptlib.stores.io_limits.RETRY_S", 0.2)
    handler = type("Router", (_Router,), {"code": code})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        place = f"{ACCOUNT};BlobEndpoint=http://127.0.0.1:{server.server_port}/a;"
        with open_store("az://bucket/run", {"connection_string": place}) as store:
            yield store
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("code", [""])
def test_without_a_code_it_is_no_word_of_a_store(store: Store) -> None:
    for call in CALLS.values():
        with pytest.raises(StoreTimeout, match=r"az://bucket/run/p: cannot .*is there a proxy in the way\?"):
            call(store)
    with pytest.raises(StoreTimeout, match=r"az://bucket/run/p: cannot delete: .*is there a proxy in the way\?"):
        store.delete("p")


@pytest.mark.parametrize("code", ["BlobNotFound"])
def test_azure_says_which_object_is_absent(store: Store) -> None:
    for call in CALLS.values():
        with pytest.raises(ObjectNotFound):
            call(store)
    store.delete("p")
