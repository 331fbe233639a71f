"""What a refusal is to whoever asked, by its code and the client: of one object alone, or of the whole store.

A restore takes the step before for the first, and ends for the second.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.s3_bucket import scale_limits

from ckptlib.errors import ObjectUnreadable, StoreDenied, StoreError
from ckptlib.stores import Store, open_store

AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("p"),
    "get a range": lambda store: store.get("p", 5, 10),
    "get into": lambda store: store.get_into("p", 0, memoryview(bytearray(4))),
    "put": lambda store: store.put("p", b"data"),
    "create": lambda store: store.put("p", b"data", create=True),
    "list": lambda store: store.scan("steps/"),
    "delete": lambda store: store.delete("p"),
}

ALONE = {("s3", 403, "AccessDenied"), ("s3", 403, "InvalidObjectState"), ("az", 403, "AuthorizationPermissionMismatch")}
ALL = {
    ("s3", 400, "ExpiredToken"),
    ("s3", 403, "RequestTimeTooSkewed"),
    ("s3", 403, "SignatureDoesNotMatch"),
    ("s3", 403, "AccountProblem"),
    ("s3", 401, ""),
    ("az", 403, "AuthenticationFailed"),
    ("az", 401, "NoAuthenticationInformation"),
}
CLIENTS = {"s3": ("s3fs", "obstore"), "az": ("obstore", "fsspec")}


class _Refusing(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    status, code = 0, ""

    def _answer(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        body = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>no</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("x-ms-error-code", self.code)
        self.send_header("Content-Length", str(len(body) if self.code else 0))
        self.end_headers()
        self.wfile.write(body if self.code else b"")

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def opened(scheme: str, client: str, status: int, code: str) -> Iterator[Store]:
    handler = type("Refusing", (_Refusing,), {"status": status, "code": code})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        options = {"key": "somebody", "secret": "s3cr3t", "endpoint_url": address}
        if scheme == "az":
            account = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};"
            options = {"connection_string": f"{account}BlobEndpoint={address}/devstoreaccount1;"}
        try:
            with open_store(f"{scheme}://bucket/run", {"client": client, **options}) as store:
                yield store
        finally:
            server.shutdown()
            thread.join()


def _cases() -> list[tuple[str, str, int, str]]:
    return [
        (scheme, client, status, code) for scheme, status, code in sorted(ALONE | ALL) for client in CLIENTS[scheme]
    ]


@pytest.mark.parametrize(("scheme", "client", "status", "code"), _cases())
def test_whose_refusal_it_is(scheme: str, client: str, status: int, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_limits(monkeypatch, idle_s=60.0, retry_s=0.2)
    with opened(scheme, client, status, code) as store:
        for name, call in CALLS.items():
            alone = name.startswith("get") and (scheme, status, code) in ALONE
            with pytest.raises(StoreError, match=rf"{scheme}://bucket/run/.*: cannot ") as told:
                call(store)
            assert type(told.value) is (ObjectUnreadable if alone else StoreDenied), name


@pytest.mark.parametrize(("code", "kind"), [("ContainerBeingDeleted", StoreDenied), ("BlobArchived", StoreError)])
def test_a_conflict_is_no_object_that_is_there(
    code: str, kind: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 409 obstore makes one error, whatever was asked."""
    scale_limits(monkeypatch, idle_s=60.0, retry_s=0.2)
    with opened("az", "obstore", 409, code) as store:
        for name, call in CALLS.items():
            if name != "create" or kind is StoreDenied:  # else it says by 409 that the key is taken
                with pytest.raises(StoreError, match=f"az://bucket/run/.*: cannot .*{code}") as told:
                    call(store)
                assert type(told.value) is kind, name
