"""What the store through obstore makes of a network and a server that fail: real requests, broken on their way."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.s3_bucket import at_most
from helpers.servers import ObjectStorage, s3_client, start_seaweedfs
from store_conformance import keys

from ckptlib.errors import CkptError, ObjectExists, ObjectUnreadable, StoreDenied, StoreError, StoreTimeout
from ckptlib.stores import LateHead, Store, io_limits, obstore_pieces, open_store
from ckptlib.testing import FaultProxy

PART = 5 << 20
"""The least that S3 takes."""
IDLE_S, PART_S = 1.0, 1.0
RETRY_S = 150.0
"""What passes is outlasted in a few seconds; what is well may take longer than IDLE_S on a busy machine."""

SHORT_RETRY_S = 4.0
"""Of what does not pass."""

LONGEST_S = 28.0
"""Less than the half of a minute that the client itself would wait; the rest is for a busy machine."""
DATA = os.urandom(2 * PART + 123)
UP = "^(PutObject|UploadPart) "
AMID = ("reset_up", "stall_up", "truncate")
"""In the middle of a body."""


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"IDLE_S": IDLE_S, "RETRY_S": RETRY_S, "SLOWEST_BPS": PART / PART_S, "PART_NBYTES": PART}
    for name, value in {**limits, "RUN_BYTES": PART, "PARTS_IN_FLIGHT": 4}.items():
        monkeypatch.setattr(io_limits, name, value)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch, short_limits: None) -> None:
    monkeypatch.setattr(io_limits, "RETRY_S", SHORT_RETRY_S)


@pytest.fixture
def proxy(s3: ObjectStorage) -> Iterator[FaultProxy]:
    with FaultProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def url(s3: ObjectStorage) -> str:
    return s3.url()


@pytest.fixture
def store(s3: ObjectStorage, proxy: FaultProxy, url: str) -> Iterator[Store]:
    with open_store(url, {**s3.options(proxy.url), "client": "obstore"}) as store:
        yield store


@pytest.fixture
def direct(s3: ObjectStorage, url: str) -> Iterator[Store]:
    """The same place by another client, past the proxy."""
    with open_store(url, {**s3.options(), "client": "fsspec"}) as store:
        yield store


def in_pieces() -> Iterator[memoryview]:
    view = memoryview(DATA)
    return (view[start : start + 300_000] for start in range(0, len(DATA), 300_000))


def open_uploads(s3: ObjectStorage, url: str) -> list[str]:
    prefix = url.partition(f"{s3.bucket}/")[2]
    found = s3_client(s3).list_multipart_uploads(Bucket=s3.bucket, Prefix=prefix)  # type: ignore[attr-defined]
    return [upload["Key"] for upload in found.get("Uploads", [])]


@pytest.mark.parametrize(
    ("kind", "op", "fault"),
    [
        *[("iterator", "UploadPart", fault) for fault in ("503", "reset_up", "stall_up", "hang_reply", "blackhole")],
        *[("iterator", "CompleteMultipartUpload", fault) for fault in ("lost_reply", "503", "blackhole")],
        ("iterator", "CreateMultipartUpload", "lost_reply"),
        *[("list", f"{op}MultipartUpload", "truncate") for op in ("Create", "Complete")],
        ("iterator", "CompleteMultipartUpload", "flip_up"),
        *[(kind, "UploadPart", "flip_up") for kind in ("iterator", "list", "late")],
        *[(kind, "UploadPart", "lost_reply") for kind in ("iterator", "list", "late")],
    ],
)
def test_a_put_gets_over_what_passes(
    store: Store, direct: Store, proxy: FaultProxy, kind: str, op: str, fault: str
) -> None:
    after: dict = {"after": PART // 2 if op == "UploadPart" else 9} if fault in AMID else {}
    proxy.rules([{"match": f"^{op} ", "fault": fault, "count": 3 if fault == "503" else 1, **after}])  # type: ignore[list-item]
    head = LateHead(4, lambda: b"head") if kind == "late" else b"head"
    with at_most(LONGEST_S):
        store.put("p", head, [DATA] if kind == "list" else in_pieces())
    assert direct.get("p") == b"head" + DATA
    assert any(request.fault for request in proxy.requests)


@pytest.mark.parametrize("op", ["UploadPart", "CompleteMultipartUpload"])
def test_what_is_given_but_once_is_not_sent_again_without_its_beginning(
    store: Store, direct: Store, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Such a put fails: what it has let go of is more than it keeps."""
    monkeypatch.setattr(obstore_pieces, "KEPT_NBYTES", 1 << 20)
    proxy.rules([{"match": f"^{op} ", "fault": "flip_up", "count": 1}])
    with pytest.raises(StoreError, match="/p: cannot put: "):
        store.put("p", b"head", in_pieces())
    assert keys(direct) == []


@pytest.mark.parametrize("fault", ["503", "reset_up", "stall_up", "hang_reply", "blackhole", "lost_reply", "flip_up"])
def test_a_small_put_gets_over_what_passes(store: Store, direct: Store, proxy: FaultProxy, fault: str) -> None:
    proxy.rules([{"match": UP, "fault": fault, "count": 1}])  # type: ignore[list-item]
    with at_most(LONGEST_S):
        store.put("p", b"head", [b"body"])
    assert direct.get("p") == b"headbody"
    assert any(request.fault for request in proxy.requests)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("nbytes", "fault"),
    [
        *[(8, fault) for fault in ("blackhole", "403")],
        *[(len(DATA), fault) for fault in ("503", "flip_up", "403")],
        pytest.param(8, "503", marks=pytest.mark.slow),
        pytest.param(len(DATA), "stall_up", marks=pytest.mark.slow),
    ],
)
def test_a_put_that_fails_leaves_nothing(
    store: Store, direct: Store, s3: ObjectStorage, url: str, proxy: FaultProxy, nbytes: int, fault: str
) -> None:
    proxy.rules([{"match": UP, "fault": fault}])  # type: ignore[list-item]
    expected = {"403": StoreDenied, "flip_up": StoreError}.get(fault, StoreTimeout)
    with at_most(LONGEST_S), pytest.raises(expected) as raised:
        store.put("p", b"", [DATA[:nbytes]])
    assert type(raised.value) is expected
    assert "s3cr3t" not in str(raised.value)
    proxy.rules([])
    assert keys(direct) == []
    assert open_uploads(s3, url) == []


@pytest.mark.parametrize(
    ("op", "fault"),
    [
        pytest.param("UploadPart", "stall_up", marks=pytest.mark.slow),
        ("UploadPart", "blackhole"),
        ("CreateMultipartUpload", "blackhole"),
    ],
)
@pytest.mark.parametrize("kind", ["iterator", pytest.param("list", marks=pytest.mark.slow)])
def test_nothing_of_a_put_goes_on_after_its_deadline(
    store: Store, direct: Store, proxy: FaultProxy, op: str, fault: str, kind: str
) -> None:
    memory = mmap.mmap(-1, len(DATA))
    memory[:] = DATA
    proxy.rules([{"match": f"^{op} .*", "fault": fault, "seconds": 2.0}])  # type: ignore[list-item]
    view = memoryview(memory)
    pieces = [view[start : start + 1_000_000] for start in range(0, len(DATA), 1_000_000)]
    with at_most(LONGEST_S), pytest.raises(StoreTimeout, match="deadline"):
        store.put("p", b"", pieces if kind == "list" else iter(pieces), deadline=time.monotonic() + 0.4)
    for lent in [*pieces, view]:
        lent.release()
    memory.close()  # which it could not be if the client still held it
    num = num_settled(proxy)
    proxy.rules([])
    time.sleep(2.0)  # what was held back is let go
    assert len(proxy.requests) == num
    assert keys(direct) == []


def num_settled(proxy: FaultProxy) -> int:
    """How many requests came, once those are seen that were on their way."""
    num = -1
    while num != len(proxy.requests):
        num = len(proxy.requests)
        time.sleep(0.3)
    return num


@pytest.mark.parametrize(("op", "nbytes"), [("PutObject", 8), ("CompleteMultipartUpload", len(DATA))])
def test_what_lands_after_a_deadline_is_whole(
    store: Store, direct: Store, proxy: FaultProxy, op: str, nbytes: int
) -> None:
    """No client can take back a request that the server has: its put fails, and the object may appear."""
    proxy.rules([{"match": f"^{op}", "fault": "hang_reply"}])
    with at_most(LONGEST_S), pytest.raises(StoreTimeout):
        store.put("p", b"", [DATA[:nbytes]], deadline=time.monotonic() + 0.5)
    proxy.rules([])
    for key in keys(direct):
        assert direct.get(key) == DATA[:nbytes]


def test_a_deadline_that_has_passed_sends_nothing(store: Store, proxy: FaultProxy) -> None:
    for nbytes in (8, len(DATA)):
        with pytest.raises(StoreTimeout):
            store.put("p", b"", [DATA[:nbytes]], deadline=time.monotonic() - 1)
    assert [request.op for request in proxy.requests if request.op in ("PutObject", "CompleteMultipartUpload")] == []


@pytest.mark.parametrize("op", ["CreateMultipartUpload", "UploadPart"])
def test_an_upload_that_is_refused_ends_what_feeds_it(store: Store, direct: Store, proxy: FaultProxy, op: str) -> None:
    """It has more to give than the client would take: to wait for that would be to wait for ever."""
    given = 0

    def pieces() -> Iterator[memoryview]:
        nonlocal given
        while given < 100:
            given += 1
            yield memoryview(DATA)[:1_000_000]

    proxy.rules([{"match": f"^{op}", "fault": "403"}])
    with at_most(LONGEST_S), pytest.raises(StoreDenied):
        store.put("p", b"", pieces(), deadline=time.monotonic() + LONGEST_S - 5)
    assert given < 100
    assert keys(direct) == []


@pytest.mark.parametrize("error", [ZeroDivisionError, TimeoutError, FileNotFoundError])
def test_an_iterator_that_fails_ends_the_upload(store: Store, proxy: FaultProxy, error: type[Exception]) -> None:
    def pieces(nbytes: int) -> Iterator[bytes]:
        yield DATA[:nbytes]
        yield DATA[:nbytes]
        raise error("of the iterator")

    for nbytes in (8, len(DATA)):
        with pytest.raises(error, match="of the iterator"):
            store.put("p", b"", pieces(nbytes))
    assert keys(store) == []
    assert "CompleteMultipartUpload" not in [request.op for request in proxy.requests]


@pytest.mark.parametrize("fault", ["stall_down", "reset_down", "truncate", "503", "blackhole"])
def test_a_get_goes_on_where_it_broke_off(store: Store, proxy: FaultProxy, fault: str) -> None:
    store.put("p", DATA)
    after = {} if fault in ("503", "blackhole") else {"after": PART // 2}
    proxy.rules([{"match": "^GetObject", "fault": fault, "nth": 1, **after}])  # type: ignore[list-item]
    into = bytearray(len(DATA) - 5)
    with at_most(LONGEST_S):
        store.get_into("p", 5, memoryview(into))
    assert into == DATA[5:]
    num_down = sum(request.nbytes_down for request in proxy.requests if request.op == "GetObject")
    assert num_down < len(DATA) + PART // 2
    proxy.rules([{"match": "^GetObject", "fault": fault, "count": 1, **after}])  # type: ignore[list-item]
    assert store.get("p") == DATA


SLOW = [pytest.param(fault, marks=pytest.mark.slow) for fault in ("503", "blackhole")]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", ["stall_down", *SLOW])
def test_a_get_that_fails_ends(store: Store, direct: Store, proxy: FaultProxy, fault: str) -> None:
    direct.put("p", DATA)
    proxy.rules([{"match": "^GetObject", "fault": fault}])  # type: ignore[list-item]
    with at_most(LONGEST_S), pytest.raises(StoreTimeout):
        store.get_into("p", 0, memoryview(bytearray(100_000)))
    into = bytearray(b"." * 100_000)
    with at_most(LONGEST_S), pytest.raises(StoreTimeout):
        store.get_into("p", 0, memoryview(into), deadline=time.monotonic() + 0.3)
    seen = bytes(into)
    proxy.rules([])
    time.sleep(0.5)
    assert into == seen


@pytest.mark.parametrize("fault", ["503", "blackhole", "lost_reply", "truncate"])
def test_listing_and_deleting_get_over_what_passes(store: Store, proxy: FaultProxy, fault: str) -> None:
    for n in range(3):
        store.put(f"a/{n}", b"")
    proxy.rules([{"fault": fault, "count": 1}])  # type: ignore[list-item]
    assert keys(store, "a/") == ["a/0", "a/1", "a/2"]
    proxy.rules([{"match": "^Delete", "fault": fault, "count": 1}])  # type: ignore[list-item]
    store.delete("a/0", "a/1")
    proxy.rules([{"match": "^Delete", "fault": fault, "count": 1}])  # type: ignore[list-item]
    store.delete("a/2")
    assert keys(store) == []


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", ["503", "403", "refuse"])
def test_an_outage_is_no_empty_listing(store: Store, proxy: FaultProxy, fault: str) -> None:
    proxy.rules([{"fault": fault}])  # type: ignore[list-item]
    for call in (lambda: store.scan("a/"), lambda: store.delete("a"), lambda: store.delete("a", "b")):
        with at_most(LONGEST_S), pytest.raises(StoreDenied if fault == "403" else StoreTimeout):
            call()


@pytest.mark.parametrize("fault", ["lost_reply", "hang_reply", "blackhole", "503"])
def test_a_lost_answer_to_a_create(store: Store, direct: Store, proxy: FaultProxy, fault: str) -> None:
    proxy.rules([{"match": "^PutObject", "fault": fault, "count": 1}])  # type: ignore[list-item]
    store.put("p", b"mine", create=True)
    assert direct.get("p") == b"mine"
    for body in (b"mine", b"another"):
        with pytest.raises(ObjectExists):
            store.put("p", body, create=True)
    proxy.rules([{"match": "^PutObject", "fault": fault, "count": 1}])  # type: ignore[list-item]
    with pytest.raises(ObjectExists):
        store.put("p", b"another", create=True)
    with pytest.raises(ObjectExists):
        store.put("p", b"", [DATA], create=True)
    assert direct.get("p") == b"mine"


def test_what_may_not_be_read(store: Store, proxy: FaultProxy) -> None:
    store.put("p", b"data")
    proxy.rules([{"match": "^GetObject", "fault": "403"}])
    with pytest.raises(ObjectUnreadable, match="403 AccessDenied"):
        store.get("p")


@pytest.mark.parametrize("wrong", [{"secret": "wr0ng-s3cr3t"}, {"key": "nobody"}, {"bucket": "no-such-bucket"}])
def test_what_somebody_must_change(s3: ObjectStorage, wrong: dict[str, str]) -> None:
    url = s3.url().replace(f"//{s3.bucket}/", f"//{wrong.get('bucket', s3.bucket)}/")
    others = {name: value for name, value in wrong.items() if name != "bucket"}
    with open_store(url, {**s3.options(), **others, "client": "obstore"}) as store:
        calls = [
            lambda: store.put("p", b"data"),
            lambda: store.put("p", b"", [DATA]),
            lambda: store.get("p"),
            lambda: store.scan("a/"),
            lambda: store.delete("p", "q"),
        ]
        for call in calls:
            with at_most(LONGEST_S), pytest.raises(StoreDenied) as raised:
                call()
            assert "s3cr3t" not in str(raised.value)


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back(tmp_path: Path) -> None:
    with (
        start_seaweedfs(tmp_path) as storage,
        open_store(storage.url(), {**storage.options(), "client": "obstore"}) as store,
    ):

        def pieces() -> Iterator[memoryview]:
            for n, piece in enumerate(in_pieces()):
                if n == 12:
                    storage.process.kill()
                    threading.Thread(target=storage.process.start).start()
                yield piece

        try:
            store.put("p", b"", pieces())
        except CkptError:  # a server may forget an upload; it must say so
            assert keys(store) == []
            store.put("p", b"", in_pieces())
        into = bytearray(len(DATA))
        store.get_into("p", 0, memoryview(into))
        assert into == DATA
