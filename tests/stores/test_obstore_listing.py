"""A page of a proxy, or one that tells of no next, is no end of a listing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from helpers.answering import Handler, Server

from ckptlib.errors import StoreError, StoreTimeout
from ckptlib.stores import Store, io_limits, open_store

NUM_IN_PAGE = 1000
PAGE = b"<html><head><title>Back soon</title></head><body>Maintenance</body></html>"


class Bucket(Server):
    """Lists so many objects, by pages; and knows nothing else of S3."""

    num = 0
    num_in_page = NUM_IN_PAGE
    foreign = -1
    """Which listing request is answered by PAGE."""
    lists_pages_alone = False
    """Whether all listings are answered by PAGE, though objects are given."""
    down = 0
    """So many requests are answered by PAGE as a file, as of a server of pages that knows no other."""
    tells_next = True
    """Whether it says where to go on, where there is more."""
    knows_start = True
    """Whether it can begin behind an object."""

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.asked: list[str] = []

    def listing(self, start: int) -> bytes:
        rows = "".join(
            f"<Contents><Key>run/k{number:06}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
            f"<ETag>&quot;e&quot;</ETag><Size>1</Size></Contents>"
            for number in range(self.num)[start : start + self.num_in_page]
        )
        end = start + self.num_in_page
        more = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < self.num and self.tells_next else ""
        told = f"<IsTruncated>{str(end < self.num).lower()}</IsTruncated>{more}{rows}"
        return f"<ListBucketResult>{told}</ListBucketResult>".encode()


class _Handler(Handler):
    server: Bucket

    def do_HEAD(self) -> None:
        is_down = len(self.server.asked) < self.server.down
        self.server.asked.append("HEAD")
        status, body = (200, PAGE) if is_down or self.has_object() else (404, b"")
        self.answer(status, body, ETag='"page"', Last_Modified="Fri, 02 Jan 2026 03:04:05 GMT")

    def has_object(self) -> bool:
        return any(self.path == f"/bucket/run/k{number:06}" for number in range(self.server.num))

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        if not asked:
            status = 200 if self.has_object() else 404
            return self.answer(status, b"x", ETag='"e"', Last_Modified="Fri, 02 Jan 2026 03:04:05 GMT")
        is_foreign = self.server.asked.count("LIST") == self.server.foreign or len(self.server.asked) < self.server.down
        self.server.asked.append("LIST")
        start = int(asked.get("continuation-token", ["0"])[0])
        if "start-after" in asked and not start and self.server.knows_start:
            start = int(asked["start-after"][0].removeprefix("run/k")) + 1
        is_foreign |= self.server.lists_pages_alone
        return self.answer(200, PAGE if is_foreign else self.server.listing(start))


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with Bucket() as server:
        yield server


def scanned(bucket: Bucket) -> list[str]:
    with open_store("s3://bucket/run", bucket.options("obstore")) as store:
        return [entry.key for entry in store.scan("")]


@pytest.mark.parametrize(
    ("num", "foreign"), [(3, 0), (NUM_IN_PAGE, 0), (NUM_IN_PAGE + 3, 0), (NUM_IN_PAGE + 3, 1), (2 * NUM_IN_PAGE + 3, 2)]
)
def test_nothing_is_missing(bucket: Bucket, num: int, foreign: int) -> None:
    bucket.num, bucket.foreign = num, foreign
    assert scanned(bucket) == [f"k{number:06}" for number in range(num)]
    assert bucket.asked.count("LIST") > foreign


@pytest.mark.parametrize("num_in_page", [100, NUM_IN_PAGE])
def test_a_page_that_tells_of_no_next_is_no_end(bucket: Bucket, num_in_page: int) -> None:
    bucket.num, bucket.num_in_page, bucket.tells_next = 2 * num_in_page + 3, num_in_page, False
    assert scanned(bucket) == [f"k{number:06}" for number in range(bucket.num)]


def test_a_server_that_knows_no_way_to_go_on(bucket: Bucket) -> None:
    """As one that has the first version of listings alone: the first page is not taken for all there is."""
    bucket.num, bucket.tells_next, bucket.knows_start = NUM_IN_PAGE + 3, False, False
    with pytest.raises(StoreError, match=r"s3://bucket/run/: cannot list: the server says that there is more"):
        scanned(bucket)


def test_a_page_that_is_a_file_is_no_store(bucket: Bucket) -> None:
    """It has an ETag and a date, whatever was asked for."""
    bucket.num, bucket.down = 3, 4
    assert len(scanned(bucket)) == 3
    assert bucket.asked == ["LIST", "HEAD", "LIST", "HEAD", "LIST"]


def test_a_listing_that_cannot_have_been_cut_is_asked_for_once(bucket: Bucket) -> None:
    bucket.num = 3
    assert len(scanned(bucket)) == 3
    assert bucket.asked == ["LIST"]


def test_an_empty_one_is_empty(bucket: Bucket) -> None:
    assert scanned(bucket) == []
    assert bucket.asked == ["LIST", "HEAD", "LIST"]


@pytest.mark.parametrize("look", [lambda store: store.scan("steps/"), lambda store: store.peek(9)])
def test_nothing_is_listed_where_an_object_was_read(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, look: Callable[[Store], object]
) -> None:
    """As through a proxy that lets objects through, and answers listings itself: that must not make a fresh run."""
    monkeypatch.setattr(io_limits, "RETRY_S", 0.1)
    bucket.num, bucket.lists_pages_alone = 3, True
    with open_store("s3://bucket/run", bucket.options("obstore")) as store:
        assert store.get("k000001") == b"x"
        with pytest.raises(StoreTimeout, match=r"cannot list: .*listed nothing, though there is an object"):
            look(store)
        bucket.num = 0
        assert look(store) == []  # the object is gone, too


def test_nothing_is_listed_of_a_prefix_where_an_object_was_read(bucket: Bucket) -> None:
    bucket.num = 3
    with open_store("s3://bucket/run", bucket.options("obstore")) as store:
        store.get("k000001")
        assert store.scan("k000002", after="k000002") == []
