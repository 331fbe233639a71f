"""The end of an upload that is answered by 200 and no result: the status comes before the parts are joined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest
from helpers.answering import Handler, Server
from helpers.s3_bucket import PART_NBYTES, scale_limits

from ckptlib.errors import StoreError
from ckptlib.stores import open_store

HEAD, DATA = bytes(4096), bytes(PART_NBYTES + 1)


class Joining(Server):
    """Takes the parts of one upload."""

    def __init__(self, answer: bytes, joins_at: int | None) -> None:
        """`joins_at`: which request to join them does so; None: none."""
        super().__init__(_Handler)
        self.answer, self.joins_at = answer, joins_at
        self.num_asked = 0
        self.parts: dict[str, int] = {}
        self.nbytes: int | None = None
        """Of the object, once there is one."""


class _Handler(Handler):
    fields: ClassVar = {"ETag": '"opaque"'}
    server: Joining

    def do_PUT(self) -> None:
        self.server.parts[self.path] = len(self.body())
        self.answer(200)

    def do_POST(self) -> None:
        self.body()
        if "uploads" in self.path:
            self.answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
            return
        self.server.num_asked += 1
        if self.server.nbytes is not None:
            self.answer(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            return
        if self.server.num_asked == self.server.joins_at:
            self.server.nbytes = sum(self.server.parts.values())
        self.answer(200, self.server.answer)

    def do_DELETE(self) -> None:
        self.answer(204)

    def do_HEAD(self) -> None:
        nbytes = self.server.nbytes
        self.answer(404 if nbytes is None else 200, bytes(nbytes or 0))


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Joining]:
    with Joining(*request.param) as server:
        yield server


def put(server: Joining) -> None:
    with open_store("s3://bucket/run", server.options()) as store:
        store.put("p", HEAD, [DATA])


@pytest.mark.parametrize("server", [(b"", None), (b"<html>busy</html>", None)], indirect=True, ids=["cut", "page"])
def test_it_is_no_success_without_an_object(server: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_limits(monkeypatch, retry_s=0.3)
    told = f"run/p: cannot put: .* by 200 without a result, and there is no object of {len(HEAD) + len(DATA)} bytes"
    with pytest.raises(StoreError, match=told):
        put(server)


@pytest.mark.parametrize(
    "server", [(b"", 1), (b"", 3), (b"<html>busy</html>", 2)], indirect=True, ids=["cut", "again", "page"]
)
def test_it_is_one_with_the_object(server: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_limits(monkeypatch)
    put(server)
    assert server.nbytes == len(HEAD) + len(DATA)
    assert server.num_asked == server.joins_at
