"""A bucket in another region than the client was told: its server says where it is, and s3fs's client goes there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from helpers.answering import Handler, Server
from helpers.s3_bucket import scale_limits

from ckptlib.errors import StoreError
from ckptlib.stores import Store, open_store


class Elsewhere(Server):
    """Takes what is signed for its region."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.region = "eu-west-3"
        self.puts: dict[str, bytes] = {}
        self.num_sent_on = 0


class _Handler(Handler):
    fields: ClassVar = {"ETag": '"opaque"'}
    server: Elsewhere

    def do_PUT(self) -> None:
        data = self.body()
        if self._is_here():
            self.server.puts[self.path] = data
            self.answer(200)

    def do_HEAD(self) -> None:
        if self._is_here():
            self.answer(404)

    def _is_here(self) -> bool:
        if f"/{self.server.region}/s3/" in self.headers["Authorization"]:
            return True
        self.server.num_sent_on += 1
        error = b"<?xml version='1.0'?><Error><Code>PermanentRedirect</Code><Message>elsewhere</Message></Error>"
        self.answer(301, error, x_amz_bucket_region="eu-west-3")
        return False


@pytest.fixture
def server() -> Iterator[Elsewhere]:
    with Elsewhere() as server:
        yield server


@pytest.fixture
def store(server: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    scale_limits(monkeypatch, idle_s=60.0, retry_s=1.0)
    options = {**server.options(), "client_kwargs": {"region_name": "us-west-1"}}
    with open_store("s3://bucket/run", options) as store:
        yield store


def test_a_put_is_sent_there_and_those_after_it_at_once(server: Elsewhere, store: Store) -> None:
    """The first request of a job is a put; aiohttp raises where the body of a request that is sent on is gone."""
    for n in range(3):
        store.put(f"p{n}", b"data")
    assert server.puts == {f"/bucket/run/p{n}": b"data" for n in range(3)}
    assert server.num_sent_on <= 2


def test_a_put_that_is_sent_in_circles_is_told_as_that(server: Elsewhere, store: Store) -> None:
    server.region = "nowhere"
    with pytest.raises(StoreError, match=r"sends this request elsewhere: correct the .* region|is in another region"):
        store.put("p", b"data")
