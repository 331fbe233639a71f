"""What a store on S3 puts on the wire, as a server sees it that keeps nothing."""

from __future__ import annotations

import base64
import hashlib
import mmap
import ssl
import sys
import zlib
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import s3fs
from helpers import answering
from helpers.certificates import self_signed
from helpers.servers import ObjectStorage

from ckptlib.errors import ObjectExists, StoreDenied, StoreError
from ckptlib.stores import Store, io_limits, open_store

REFUSAL = b'<?xml version="1.0"?><Error><Code>%s</Code><Message>no</Message></Error>'


class Recorder(answering.Server):
    """Answers every PUT; refuses those whose sums it does not like."""

    def __init__(self) -> None:
        super().__init__(Handler)
        self.heads: list[Message] = []
        self.bodies: list[bytes] = []
        self.refused: set[str] = set()
        self.refusal = 501, REFUSAL % b"NotImplemented"
        self.knows_crc32 = True
        self.has_ranges = True
        self.has_objects = True
        """Whether HEAD finds any object."""


class Handler(answering.Handler):
    server: Recorder

    def do_PUT(self) -> None:
        body = self.body()
        self.server.heads.append(self.headers)
        self.server.bodies.append(body)
        if any(name in self.headers for name in self.server.refused):
            self.answer(*self.server.refusal)
            return
        echo = {"x-amz-checksum-crc32": self.headers["x-amz-checksum-crc32"]} if self.server.knows_crc32 else {}
        self.answer(200, b"", ETag='"opaque"', **{name: value for name, value in echo.items() if value})

    def do_POST(self) -> None:
        """Begins an upload, or ends it."""
        if self.path.endswith("?uploads"):
            self.answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        else:
            self.do_PUT()

    def do_DELETE(self) -> None:
        self.answer(204)

    def do_GET(self) -> None:
        """Of any object: as a server that knows nothing of ranges, or that has none of them."""
        if self.server.has_ranges:
            self.answer(200, b"0123456789", ETag='"opaque"')
        else:
            self.answer(416, REFUSAL % b"InvalidRange")

    def do_HEAD(self) -> None:
        if self.server.has_objects:
            self.answer(200, b"0123456789", ETag='"opaque"')
        else:
            self.answer(404)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as server:
        yield server


@pytest.fixture
def store(recorder: Recorder) -> Iterator[Store]:
    with open_store("s3://bucket/run", recorder.options()) as store:
        yield store


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_a_body_waits_for_nothing_and_carries_its_sum(recorder: Recorder, store: Store, kind: type) -> None:
    data = bytes(range(256)) * 8000
    store.put("a", b"head", [kind(data)[start : start + 7001] for start in range(0, len(data), 7001)])
    (head,) = recorder.heads
    assert recorder.bodies == [b"head" + data]
    assert "Expect" not in head
    assert "Transfer-Encoding" not in head
    assert head["x-amz-checksum-crc32"] == crc32(b"head" + data)
    assert head["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert "x-amz-checksum-crc32" in head["Authorization"]  # signed, so that a proxy cannot change both


def test_nothing_is_put_unchecked_before_the_server_is_known(recorder: Recorder, store: Store) -> None:
    for _ in range(2):
        store.put("a", b"1")
    first, second = recorder.heads
    assert first["Content-MD5"] == base64.b64encode(hashlib.md5(b"1").digest()).decode()
    assert second["Content-MD5"] is None
    assert first["x-amz-checksum-crc32"] == second["x-amz-checksum-crc32"] == crc32(b"1")


@pytest.mark.parametrize(
    ("refused", "knows_crc32", "expected"),
    [
        (set(), False, [{"crc32", "md5"}, {"md5"}]),
        ({"x-amz-checksum-crc32"}, False, [{"crc32", "md5"}, {"crc32"}, {"md5"}, {"md5"}]),
        ({"Content-MD5"}, True, [{"crc32", "md5"}, {"crc32"}, {"crc32"}]),
    ],
    ids=["ignores crc32", "refuses crc32", "refuses md5"],
)
def test_servers_of_other_times(
    recorder: Recorder, store: Store, refused: set[str], knows_crc32: bool, expected: list[set[str]]
) -> None:
    recorder.refused, recorder.knows_crc32 = refused, knows_crc32
    for _ in range(2):
        store.put("a", b"1")
    names = {"crc32": "x-amz-checksum-crc32", "md5": "Content-MD5"}
    assert [{sum for sum, name in names.items() if name in head} for head in recorder.heads] == expected


def test_a_server_that_knows_no_sum_at_all(recorder: Recorder, store: Store) -> None:
    recorder.refused = {"x-amz-checksum-crc32", "Content-MD5"}
    with pytest.raises(StoreError, match="NotImplemented"):
        store.put("a", b"1")


def test_a_server_that_knows_no_ranges(store: Store) -> None:
    assert store.get("a") == b"0123456789"
    for call in (lambda: store.get("a", 3, 2), lambda: store.get("a", 0, 2), lambda: store.get("a", 3)):
        with pytest.raises(StoreError, match="expected bytes"):
            call()


def test_a_range_that_is_refused_though_it_is_there(recorder: Recorder, store: Store) -> None:
    recorder.has_ranges = False
    memory = bytearray(b"....")
    for call in (
        lambda: store.get("a", 3, 2),
        lambda: store.get("a"),
        lambda: store.get("a", 3),
        lambda: store.get_into("a", 3, memoryview(memory)),
    ):
        with pytest.raises(StoreError, match="InvalidRange"):
            call()
    assert store.get("a", 10) == b""
    assert memory == b"...."


REFUSALS = [(501, REFUSAL % b"NotImplemented"), (501, b""), (405, b""), (400, b""), (400, REFUSAL % b"InvalidRequest")]


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_server_that_knows_no_conditions(recorder: Recorder, store: Store, refusal: tuple[int, bytes]) -> None:
    recorder.refused, recorder.refusal, recorder.has_objects = {"If-None-Match"}, refusal, False
    store.put("a", b"1", create=True)
    assert "If-None-Match" in recorder.heads[0]
    assert "If-None-Match" not in recorder.heads[-1]
    assert recorder.bodies[-1] == b"1"


@pytest.mark.parametrize("refusal", REFUSALS)
def test_a_server_that_knows_no_conditions_through_obstore(
    recorder: Recorder, refusal: tuple[int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_limits, "RETRY_S", 0.2)  # the client takes the answer for an outage
    recorder.refused, recorder.refusal, recorder.has_objects = {"If-None-Match"}, refusal, False
    with open_store("s3://bucket/run", recorder.options("obstore")) as store:
        store.put("a", b"1", create=True)
        num_asked = len(recorder.heads)
        store.put("b", b"2", create=True)
        recorder.has_objects = True
        with pytest.raises(ObjectExists):
            store.put("b", b"3", create=True)
    assert "If-None-Match" in recorder.heads[0]
    assert ["If-None-Match" in head for head in recorder.heads[num_asked - 1 :]] == [False, False]
    assert recorder.bodies[num_asked - 1 :] == [b"1", b"2"]


@pytest.mark.parametrize("part_nbytes", [1 << 20, 4])
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
@pytest.mark.parametrize("refusal", [REFUSALS[0], (400, b"")])
def test_a_refusal_that_says_nothing_of_what_is_there_overwrites_nothing(
    recorder: Recorder, client: str, refusal: tuple[int, bytes], part_nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a proxy, or of a server that takes a damaged request for a bad one."""
    monkeypatch.setattr(io_limits, "PART_NBYTES", part_nbytes)
    recorder.refused, recorder.refusal = {"If-None-Match"}, refusal
    with open_store("s3://bucket/run", recorder.options(client)) as store, pytest.raises(ObjectExists, match="run/a"):
        store.put("a", b"01234", create=True)
    sent = zip(recorder.heads, recorder.bodies, strict=True)
    whole = [head for head, body in sent if body == b"01234" or body.startswith(b"<Complete")]
    assert all("If-None-Match" in head for head in whole)


@pytest.mark.parametrize("older", [False, True])
def test_who_pays_is_told_whatever_the_version_of_s3fs(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    def merged(fs: Any, method: Any, *given: dict[str, object], **parameters: object) -> dict[str, object]:
        """As s3fs 2024.2 does it, which is allowed."""
        for some in reversed(given):
            parameters = {**some, **parameters}
        found: dict[str, object] = fs._filter_kwargs(method, {**fs.s3_additional_kwargs, **parameters})
        return found

    if older:
        monkeypatch.setattr(s3fs.S3FileSystem, "_get_s3_method_kwargs", merged)
    options = {"key": "somebody", "secret": "s3cr3t", "endpoint_url": recorder.url, "requester_pays": True}
    with open_store("s3://bucket/run", options) as store:
        store.put("a", b"1")
    assert [head["x-amz-request-payer"] for head in recorder.heads] == ["requester"]


@pytest.mark.parametrize("nbytes", [1 << 20, 40 << 20])
def test_what_was_put_may_be_unmapped(s3: ObjectStorage, nbytes: int) -> None:
    """A slot is closed when it is given free; a view that somebody still holds would forbid it."""
    with open_store(s3.url(), s3.options()) as store:
        for _ in range(2):
            with mmap.mmap(-1, nbytes) as memory:
                view = memoryview(memory)
                store.put("a", b"head", [view[: nbytes // 3], view[nbytes // 3 :]])
                view.release()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    return self_signed(tmp_path / "certificate.pem")


def test_tls(recorder: Recorder, certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    recorder.socket = context.wrap_socket(recorder.socket, server_side=True)
    options = {"key": "somebody", "secret": "s3cr3t", "endpoint_url": f"https://localhost:{recorder.server_port}"}
    data = bytes(range(256)) * 20_000
    with open_store("s3://bucket/run", {**options, "client_kwargs": {"verify": str(certificate)}}) as store:
        store.put("a", data[:1000], [data[1000:]])
    assert recorder.bodies == [data]
    with (
        open_store("s3://bucket/run", options) as store,
        pytest.raises(StoreDenied, match="certificate is not trusted: set AWS_CA_BUNDLE"),
    ):
        store.put("a", data)


def test_credentials_from_the_environment_and_from_a_profile(
    s3: ObjectStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, key, secret = s3.url(), str(s3.secrets["key"]), str(s3.secrets["secret"])
    path = tmp_path / "credentials"
    path.write_text(f"[mine]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
        with open_store(url, {"profile": "mine", "endpoint_url": s3.endpoint}) as store:
            store.put("a", b"1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with open_store(url, {"client_kwargs": {"endpoint_url": s3.endpoint, "region_name": "eu-west-1"}}) as store:
        assert store.get("a") == b"1"


def test_without_s3fs_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ckptlib.stores.s3")
    monkeypatch.setitem(sys.modules, "botocore.exceptions", None)
    with pytest.raises(ImportError, match=r"s3://bucket/run needs s3fs.*ckptlib.s3"):
        open_store("s3://bucket/run")
