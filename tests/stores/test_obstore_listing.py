"""A proxy's page in place of a listing, or of one of its pages, is no end of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from ckptlib.stores import open_store

NUM_IN_PAGE = 1000
PAGE = b"<html><head><title>Back soon</title></head><body>Maintenance</body></html>"


class Bucket(ThreadingHTTPServer):
    """Lists so many objects, by pages; and knows nothing else of S3."""

    daemon_threads = True
    num = 0
    foreign = -1
    """Which listing request is answered by PAGE."""
    down = 0
    """So many requests are answered by PAGE as a file, as of a server of pages that knows no other."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []

    def listing(self, start: int) -> bytes:
        rows = "".join(
            f"<Contents><Key>run/k{number:06}</Key><LastModified>2026-01-02T03:04:05.000Z</LastModified>"
            f"<ETag>&quot;e&quot;</ETag><Size>1</Size></Contents>"
            for number in range(self.num)[start : start + NUM_IN_PAGE]
        )
        end = start + NUM_IN_PAGE
        more = f"<NextContinuationToken>{end}</NextContinuationToken>" if end < self.num else ""
        told = f"<IsTruncated>{str(end < self.num).lower()}</IsTruncated>{more}{rows}"
        return f"<ListBucketResult>{told}</ListBucketResult>".encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def do_HEAD(self) -> None:
        is_down = len(self.server.asked) < self.server.down
        self.server.asked.append("HEAD")
        self.send_response(200 if is_down else 404)
        self.send_header("ETag", '"page"')
        self.send_header("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
        self.send_header("Content-Length", str(len(PAGE) if is_down else 0))
        self.end_headers()

    def do_GET(self) -> None:
        asked = parse_qs(urlsplit(self.path).query)
        is_foreign = self.server.asked.count("LIST") == self.server.foreign or len(self.server.asked) < self.server.down
        self.server.asked.append("LIST")
        data = PAGE if is_foreign else self.server.listing(int(asked.get("continuation-token", ["0"])[0]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with Bucket() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def scanned(bucket: Bucket) -> list[str]:
    options = {"key": "somebody", "secret": "s3cr3t", "endpoint_url": f"http://127.0.0.1:{bucket.server_port}"}
    with open_store("s3://bucket/run", {**options, "client": "obstore"}) as store:
        return [entry.key for entry in store.scan("")]


@pytest.mark.parametrize(
    ("num", "foreign"), [(3, 0), (NUM_IN_PAGE, 0), (NUM_IN_PAGE + 3, 0), (NUM_IN_PAGE + 3, 1), (2 * NUM_IN_PAGE + 3, 2)]
)
def test_nothing_is_missing(bucket: Bucket, num: int, foreign: int) -> None:
    bucket.num, bucket.foreign = num, foreign
    assert scanned(bucket) == [f"k{number:06}" for number in range(num)]
    assert bucket.asked.count("LIST") > foreign


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
