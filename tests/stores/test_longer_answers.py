"""An answer to a range that is longer than the range, as a proxy gives it that packs or adds: an error of the store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from helpers.answering import Handler, Server

from ckptlib.errors import StoreError
from ckptlib.stores import Store, open_store

DATA = bytes(range(100))


class _Longer(Handler):
    fields: ClassVar = {"ETag": '"e"', "Last-Modified": "Fri, 02 Jan 2026 03:04:05 GMT"}

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.answer(206, DATA[first : last + 1] + b"and more", Content_Range=f"bytes {first}-{last}/{len(DATA)}")

    def do_HEAD(self) -> None:
        self.answer(200, DATA)


@pytest.fixture(params=["s3fs", "obstore"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with Server(_Longer) as server, open_store("s3://bucket/run", server.options(request.param)) as store:
        yield store


def test_it_is_no_answer(store: Store) -> None:
    with pytest.raises(StoreError, match="run/p: cannot get: expected"):
        store.get("p", 10, 20)
    into = bytearray(20)
    with pytest.raises(StoreError, match="run/p: cannot get: expected"):
        store.get_into("p", 10, memoryview(into))
    assert into in (bytes(20), DATA[10:30])
