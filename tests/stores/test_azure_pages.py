"""404 of a proxy in front of Azure is an outage, by adlfs: by an absent `ckptlib.json` a job would make a new root."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers.answering import Handler, Server

from ckptlib.errors import ObjectNotFound, StoreTimeout
from ckptlib.stores import Store, fsspec_client, open_store

ACCOUNT = "DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5"

CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("p"),
    "get a range": lambda store: store.get("p", 5, 10),
    "get into": lambda store: store.get_into("p", 0, memoryview(bytearray(4))),
}


class _Router(Handler):
    code = ""

    def do_GET(self) -> None:
        page = b"<html><body>default backend - 404</body></html>"
        self.answer(404, page, Content_Type="text/html", **({"x-ms-error-code": self.code} if self.code else {}))

    do_DELETE = do_GET


@pytest.fixture
def store(code: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    pytest.importorskip("adlfs")
    monkeypatch.setattr(fsspec_client, "RETRY_S", 0.2)
    monkeypatch.setattr("ckptlib.stores.io_limits.RETRY_S", 0.2)
    handler = type("Router", (_Router,), {"code": code})
    with Server(handler) as server:
        place = f"{ACCOUNT};BlobEndpoint={server.url}/a;"
        with open_store("az://bucket/run", {"connection_string": place}) as store:
            yield store


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
