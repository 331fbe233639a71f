"""A server whose listings do not lead on: it is told of, and not asked for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from helpers.answering import Handler, Server

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


class Repeating(Server):
    """Whatever page it is asked for, it gives the first one."""

    def __init__(self, where: str) -> None:
        super().__init__(_Handler)
        self.where, self.num = where, 0


class _Handler(Handler):
    server: Repeating

    def do_GET(self) -> None:
        self.server.num += 1
        kind, found = ("ListMultipartUploads", "") if "uploads" in self.path else ("ListBucket", FOUND)
        where = self.server.where.format(self.server.num)
        body = f"<{kind}Result><IsTruncated>true</IsTruncated>{where}{found}</{kind}Result>".encode()
        self.answer(200 if self.server.num <= MOST else 403, body)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Repeating]:
    with Repeating(WHERE[request.param]) as server:
        yield server


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize("server", ["same token", "new token"], indirect=True)
def test_objects(server: Repeating, client: str) -> None:
    told = r"s3://bucket/run/k: cannot list: .* or gives a page again; .* update it"
    with open_store("s3://bucket/run", server.options(client)) as store, pytest.raises(StoreError, match=told):
        store.scan("k")


@pytest.mark.parametrize("server", ["markers", "marker", "nothing"], indirect=True)
def test_uploads(server: Repeating) -> None:
    told = r"cannot list uploads: the server says that there is more, but not where"
    with open_store("s3://bucket/run", server.options()) as store, pytest.raises(StoreError, match=told):
        store.clean(time.time(), lambda key: True)
