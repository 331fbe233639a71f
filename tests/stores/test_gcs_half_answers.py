"""Uploads to GCS that are answered by success, and not by what tells of an object: as by a proxy, or by a server that
wants more of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from gcsfs.core import GCSFileSystem
from helpers.answering import Handler, Server

from ckptlib.errors import StoreTimeout
from ckptlib.stores import Store, io_limits, open_store

PIECE_NBYTES = 1 << 18
"""An object of as many bytes is sent in pieces of them."""


class Uploads(Server):
    """Answers the first `num_bad` ends of an upload by one that is none, and later ones as Google does."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.status, self.bad, self.num_bad = 200, b"", 10**6
        self.num_ends = 0


class _Handler(Handler):
    server: Uploads

    def do_POST(self) -> None:
        body = self.body()
        if "uploadType=resumable" in self.path:
            self.answer(200, Location=f"{self.server.url}/upload/storage/v1/session-of-this-upload")
            return
        told = self.headers["Content-Range"]  # "bytes FIRST-LAST/ALL" of a piece
        nbytes = len(body.split(b"\n\n")[-1].removesuffix(b"\n--==0==--")) if told is None else int(told.split("/")[1])
        if told is not None and not told.startswith(f"bytes {PIECE_NBYTES}-"):
            last = told.removeprefix("bytes ").split("/")[0].split("-")[1]
            self.answer(308, Range=f"bytes=0-{last}")
            return
        self.server.num_ends += 1
        if self.server.num_ends <= self.server.num_bad:
            self.answer(self.server.status, self.server.bad)
        else:
            self.answer(200, b'{"size": "%d"}' % nbytes)

    def do_DELETE(self) -> None:
        self.answer(204)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Uploads]:
    monkeypatch.setattr(io_limits, "RETRY_S", 0.1)
    pipe = GCSFileSystem._pipe_file
    pieces = [PIECE_NBYTES if value == 50 << 20 else value for value in pipe.__defaults__]
    monkeypatch.setattr(pipe, "__defaults__", tuple(pieces))
    with Uploads() as server:
        yield server


@pytest.fixture
def store(server: Uploads) -> Iterator[Store]:
    options: Mapping[str, object] = {"token": "anon", "project": "p", "endpoint_url": server.url}
    with open_store("gs://bucket/run", options) as store:
        yield store


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (200, b""),
        (200, b"<html>busy</html>"),
        (204, b""),
        (308, b""),
        (499, b""),
        (200, b"{}"),
        (200, b'{"size": "3"}'),
    ],
)
@pytest.mark.parametrize("nbytes", [1000, PIECE_NBYTES + 1], ids=["whole", "in pieces"])
def test_no_object_was_put(store: Store, server: Uploads, nbytes: int, status: int, answer: bytes) -> None:
    server.status, server.bad = status, answer
    with pytest.raises(StoreTimeout, match=r"run/packs/p: cannot put: .*is there a proxy in the way\?"):
        store.put("packs/p", bytes(nbytes))


@pytest.mark.parametrize("nbytes", [1000, PIECE_NBYTES + 1], ids=["whole", "in pieces"])
def test_it_is_put_again(store: Store, server: Uploads, monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(io_limits, "RETRY_S", 60.0)
    server.num_bad = 2
    store.put("packs/p", bytes(nbytes))
    assert server.num_ends == 3
