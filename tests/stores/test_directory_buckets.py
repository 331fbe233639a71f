"""A directory bucket of S3, as Amazon's documents describe it: a front of moto refuses what they call unsupported.

Amazon itself was not asked. ListObjectsV2 and ListMultipartUploads take no prefix but one that ends in a slash, no
start-after, and no upload-id-marker; listings are in no order, and markers are no keys.
"""

from __future__ import annotations

import http.client
import re
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
import torch
from helpers.answering import Handler, Server
from helpers.registry import forget_session
from helpers.s3 import S3_KEYS, s3_options

import ckptlib
from ckptlib.format.keys import is_known
from ckptlib.stores import open_store

BUCKET = "bucket--use1-az4--x-s3"
PACK = "packs/000000000100-000003-aaaaaaaa/000000-25b4d951-{:06d}.safetensors"
UPLOAD = re.compile(rb"<Upload>.*?<Key>(.*?)</Key>.*?</Upload>", re.DOTALL)
CONTENTS = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)


class Front(Server):
    def __init__(self, upstream: str) -> None:
        super().__init__(_Handler)
        self.upstream = upstream.removeprefix("http://")
        self.refused: list[str] = []


class _Handler(Handler):
    server: Front

    def _answer(self) -> None:
        body = self.body()
        asked = parse_qs(urlsplit(self.path).query, keep_blank_values=True)
        lists = self.command == "GET" and ("list-type" in asked or "uploads" in asked)
        prefix = asked.get("prefix", [""])[0]
        if lists and ((prefix and not prefix.endswith("/")) or {"start-after", "upload-id-marker"} & {*asked}):
            self.server.refused.append(self.path)
            self._send(501, {}, b"<Error><Code>NotImplemented</Code><Message>unsupported</Message></Error>")
            return
        connection = http.client.HTTPConnection(self.server.upstream, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            found = answer.read()
            if lists:
                contents = CONTENTS.findall(found)
                found = CONTENTS.sub(lambda _: contents.pop(), found)  # the last one first
            if lists and "uploads" in asked:
                found = _one_upload(found, asked.get("key-marker", [""])[0])
            self._send(answer.status, dict(answer.getheaders()), found)
        finally:
            connection.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer

    def _send(self, status: int, fields: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        nbytes = fields.get("Content-Length") if self.command == "HEAD" else None
        for name, value in fields.items():
            if name.lower() not in ("content-length", "connection", "date", "server", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", nbytes or str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _one_upload(page: bytes, marker: str) -> bytes:
    """Of a page of uploads the first behind the marker, and the next marker where more come."""
    left = [found for found in UPLOAD.finditer(page) if found[1] > bytes.fromhex(marker)]
    tail = b"<IsTruncated>false</IsTruncated>"
    if len(left) > 1:
        next_marker = left[0][1].hex().encode()
        tail = b"<IsTruncated>true</IsTruncated><NextKeyMarker>%s</NextKeyMarker>" % next_marker
    uploads = b"".join(found[0] for found in left[:1])
    return b"<ListMultipartUploadsResult>%s%s</ListMultipartUploadsResult>" % (uploads, tail)


@pytest.fixture
def front(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    monkeypatch.setenv("AWS_S3_DISABLE_EXPRESS_SESSION_AUTH", "true")  # moto has no sessions
    boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1", **S3_KEYS).create_bucket(Bucket=BUCKET)
    with Front(s3_endpoint) as front:
        yield front


@pytest.fixture
def url() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


def test_saves_commit(front: Front, url: str) -> None:
    options, weight = s3_options(front.url), torch.zeros(1000)
    for step in (1, 2, 3):
        weight += 1
        ckptlib.save(url, {"w": weight}, step, storage_options=options, keep=ckptlib.Keep(last=2))
    session = forget_session(url)
    assert session is not None
    session.close(timedelta(seconds=60), clean=True)  # the writer drops what is too many
    assert [info.step for info in ckptlib.checkpoints(url, storage_options=options)] == [2, 3]
    state = {"w": torch.zeros(1000)}
    ckptlib.load(url, state, storage_options=options)
    assert torch.equal(state["w"], torch.full((1000,), 3.0))
    assert front.refused == []


def test_listings(front: Front, url: str) -> None:
    with open_store(url, s3_options(front.url)) as store:
        for key in ("a/1", "a/2", "a/12", "b", "a-1/3"):
            store.put(key, b"1")
        for prefix, after, expected in (
            ("a/1", "", ["a/1", "a/12"]),
            ("a", "", ["a-1/3", "a/1", "a/12", "a/2"]),
            ("a/", "a/11", ["a/12", "a/2"]),
            ("", "a/2", ["b"]),
            ("c", "", []),
        ):
            assert [entry.key for entry in store.scan(prefix, after)] == expected
        assert store.peek(1) != []
    assert front.refused == []


def test_unfinished_uploads(front: Front, url: str, s3_endpoint: str) -> None:
    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1", **S3_KEYS)
    prefix = url.rpartition("/")[2] + "/"
    for n in range(3):
        client.create_multipart_upload(Bucket=BUCKET, Key=prefix + PACK.format(n))
    with open_store(url, s3_options(front.url)) as store:
        store.clean(time.time() + 60, is_known)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)
    assert front.refused == []
