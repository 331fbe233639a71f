"""An object that a proxy compresses on its way is not damaged: an error of the store, which ends a restore."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

import pytest
from helpers.answering import Handler, Server

from ckptlib.errors import StoreError
from ckptlib.stores import Store, open_store

DATA = b"data" * 1000


class _Packing(Handler):
    encoding = ""

    def do_GET(self) -> None:
        body = gzip.compress(DATA) if "gzip" in self.encoding.lower() else DATA
        self.answer(
            *(200, body),
            ETag='"e"',
            Last_Modified="Fri, 02 Jan 2026 03:04:05 GMT",
            Content_Encoding=self.encoding,
        )


@pytest.fixture(params=["s3fs", "obstore"])
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(client: str, encoding: str) -> Iterator[Store]:
    handler = type("Packing", (_Packing,), {"encoding": encoding})
    with Server(handler) as server, open_store("s3://bucket/run", server.options(client)) as store:
        yield store


@pytest.mark.parametrize("encoding", ["gzip", "GZip", "aws-chunked, gzip"])
def test_they_are_told_as_such(store: Store) -> None:
    with pytest.raises(StoreError, match=r"run/p: cannot get: .* encoding .*(?i:gzip).* a proxy in the way") as told:
        store.get("p")
    assert type(told.value) is StoreError


@pytest.mark.parametrize("encoding", ["aws-chunked", "identity"])
def test_some_servers_tell_how_the_request_came(store: Store) -> None:
    assert store.get("p") == DATA
