"""Requests to GCS that are answered by success, and not by what tells of an object: as by a proxy, or by a server that
wants more of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
from gcsfs.core import GCSFileSystem
from helpers.answering import Handler, Server

from ckptlib.errors import StoreTimeout
from ckptlib.stores import Store, io_limits, open_store

PIECE_NBYTES = 1 << 18
"""An object of as many bytes is sent in pieces of them."""


DOCUMENT = b"a document"


class Uploads(Server):
    """Answers the first `num_bad` ends of an upload by one that is none, and later ones as Google does."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.status, self.bad, self.num_bad = 200, b"", 10**6
        self.num_ends = 0


class _Handler(Handler):
    server: Uploads

    def do_GET(self) -> None:
        """Gives the document, and a listing without objects, after `num_bad` answers that are none."""
        self.server.num_ends += 1
        if self.server.num_ends <= self.server.num_bad:
            self.answer(200, self.server.bad)
        elif "alt=media" in self.path:
            self.answer(206, DOCUMENT, Content_Range=f"bytes 0-{len(DOCUMENT) - 1}/{len(DOCUMENT)}")
        else:
            self.answer(200, b'{"kind": "storage#objects"}')

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


READS: list[tuple[Callable[[Store], object], object]] = [
    (lambda store: store.get("steps/s"), DOCUMENT),
    (lambda store: store.get("steps/s", 0, len(DOCUMENT)), DOCUMENT),
    (lambda store: store.scan("steps/"), []),
]


@pytest.mark.parametrize("answer", [b"<html>busy</html>", b"{}", b"null", b"0123456789"])
@pytest.mark.parametrize(("read", "found"), READS, ids=["document", "range", "listing"])
def test_a_page_is_neither_an_object_nor_a_listing(
    store: Store, server: Uploads, read: Callable[[Store], object], found: object, answer: bytes
) -> None:
    """A restore would take the step for a damaged one, go on from the one before, and leave this one behind."""
    server.bad = answer
    with pytest.raises(StoreTimeout, match=r"run/steps/\w*: cannot \w+: .*is there a proxy in the way\?"):
        read(store)
    server.num_bad = 0
    assert read(store) == found


@pytest.mark.parametrize(("read", "found"), READS, ids=["document", "range", "listing"])
def test_it_is_asked_for_again(
    store: Store, server: Uploads, monkeypatch: pytest.MonkeyPatch, read: Callable[[Store], object], found: object
) -> None:
    monkeypatch.setattr(io_limits, "RETRY_S", 60.0)
    server.bad, server.num_bad = b"<html>busy</html>", 2
    assert read(store) == found
