"""What a refusal is to whoever asked, by its code and the client: of one object alone, or of the whole store.

A restore takes the step before for the first, and ends for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from helpers.answering import Handler, Server
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


class _Refusing(Handler):
    status, code = 0, ""

    def do_GET(self) -> None:
        self.body()
        told = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>no</Message></Error>".encode()
        more = {"Content-Type": "application/xml", "x-ms-error-code": self.code}
        self.answer(self.status, told if self.code else b"", **more)

    do_PUT = do_POST = do_DELETE = do_GET


@contextmanager
def opened(scheme: str, client: str, status: int, code: str) -> Iterator[Store]:
    handler = type("Refusing", (_Refusing,), {"status": status, "code": code})
    with Server(handler) as server:
        options = server.options(client)
        if scheme == "az":
            account = f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={AZURITE_KEY};"
            place = f"{account}BlobEndpoint={server.url}/devstoreaccount1;"
            options = {"connection_string": place, "client": client}
        with open_store(f"{scheme}://bucket/run", options) as store:
            yield store


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
def test_a_conflict_through_obstore_is_no_object_that_is_there(
    code: str, kind: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes one error of 409, whatever was asked."""
    scale_limits(monkeypatch, idle_s=60.0, retry_s=0.2)
    with opened("az", "obstore", 409, code) as store:
        for name, call in CALLS.items():
            if name != "create" or kind is StoreDenied:  # else it says by 409 that the key is taken
                with pytest.raises(StoreError, match=f"az://bucket/run/.*: cannot .*{code}") as told:
                    call(store)
                assert type(told.value) is kind, name
