"""What a store on S3 does when a request meets a fault, on real servers: each row of the table, up and down."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from helpers.s3_bucket import IDLE_S, PART_NBYTES, Bucket, at_most, bucket_of, scale_limits

from ckptlib.errors import ObjectUnreadable, StoreDenied, StoreError, StoreTimeout
from ckptlib.format.keys import is_known
from ckptlib.stores import LateHead, io_limits

NBYTES = 2 * PART_NBYTES + 12345
HALF = PART_NBYTES // 2
HEAD = b"h" * 4096
UP = "^(PutObject|UploadPart) "
DOWN = "^GetObject "
SHORT_RETRY_S = 2.0
MOST_S = 12 * (SHORT_RETRY_S + IDLE_S)
"""Of a call that gives up: a busy machine is slow."""

ONCE = [
    *(("reset_up", 1), ("stall_up", 1), ("flip_up", 1)),
    *(("503", 3), ("500", 3), ("429", 1), ("refuse", 1)),
    *(("blackhole", 1), ("hang_reply", 1), ("lost_reply", 1)),
]
ALWAYS = [
    *((64, fault) for fault in ("flip_up", "503", "blackhole", "hang_reply")),
    *((NBYTES, fault) for fault in ("reset_up", "stall_up", "flip_up", "refuse")),
    pytest.param(NBYTES, "hang_reply", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=["s3", pytest.param("juicefs", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest) -> Iterator[Bucket]:
    """Once: it is the start of the client that takes time."""
    with pytest.MonkeyPatch.context() as patch:
        scale_limits(patch)
        with bucket_of(request.getfixturevalue(request.param)) as bucket:
            yield bucket


@pytest.fixture
def bucket(opened: Bucket) -> Bucket:
    opened.empty()
    return opened


def put(bucket: Bucket, data: bytes, late: bool, deadline: float | None = None) -> None:
    view = memoryview(data)
    pieces = [view[start : start + (3 << 20) + 1] for start in range(0, len(data), (3 << 20) + 1)]
    bucket.store.put("p", LateHead(len(HEAD), lambda: HEAD) if late else HEAD, iter(pieces), deadline=deadline)


@pytest.mark.parametrize(("fault", "count"), ONCE)
@pytest.mark.parametrize("nbytes", [pytest.param(64, marks=pytest.mark.slow), NBYTES])
def test_a_put_outlasts_what_passes(bucket: Bucket, fault: str, count: int, nbytes: int) -> None:
    data = os.urandom(nbytes)
    after = {"after": min(HALF, nbytes // 2)} if fault.endswith("_up") else {}
    bucket.breaks(UP, fault, count, **after)
    put(bucket, data, late=nbytes == NBYTES)
    assert sum(request.fault == fault for request in bucket.requests()) == count
    assert bucket.listed() == {"p": len(HEAD) + nbytes}
    assert bucket.bytes_of("p") == HEAD + data
    assert bucket.uploads() == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_limits, "RETRY_S", SHORT_RETRY_S)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("nbytes", "fault"), ALWAYS)
def test_a_put_gives_up_and_leaves_nothing(bucket: Bucket, fault: str, nbytes: int) -> None:
    bucket.breaks(UP, fault)
    with (
        at_most(MOST_S),
        pytest.raises(StoreTimeout, match=r"/p: cannot put.*: gave up after \d.* s, \d+ tries: .*, \d+ bytes"),
    ):
        put(bucket, os.urandom(nbytes), late=False)
    if fault == "hang_reply" and nbytes == 64:
        assert bucket.listed() in ({}, {"p": len(HEAD) + 64})  # whole, and the store never said so
    else:
        assert bucket.listed() == {}
    assert bucket.uploads() == []


@pytest.mark.parametrize("op", ["CreateMultipartUpload", "CompleteMultipartUpload"])
@pytest.mark.parametrize(
    ("fault", "count"),
    [("503", 3), ("lost_reply", 1), ("blackhole", 1), pytest.param("hang_reply", 1, marks=pytest.mark.slow)],
)
def test_what_begins_and_ends_an_upload_is_sent_again(bucket: Bucket, op: str, fault: str, count: int) -> None:
    data = os.urandom(NBYTES)
    bucket.breaks(f"^{op} ", fault, count)
    put(bucket, data, late=False)
    assert bucket.bytes_of("p") == HEAD + data
    orphans = 1 if op == "CreateMultipartUpload" and fault in ("lost_reply", "hang_reply") else 0
    assert bucket.uploads() == ["p"] * orphans
    bucket.store.clean(time.time() + 60, lambda key: key == "p")
    assert bucket.uploads() == []
    assert bucket.bytes_of("p") == HEAD + data


@pytest.mark.parametrize("at", [0, 5, 130])
def test_a_list_of_parts_that_was_altered_on_its_way_is_sent_again(bucket: Bucket, at: int) -> None:
    """`at`: which byte; the server finds no upload, no list and no such part."""
    data = os.urandom(NBYTES)
    bucket.breaks("^CompleteMultipartUpload ", "flip_up", 1, after=at)
    put(bucket, data, late=False)
    assert bucket.bytes_of("p") == HEAD + data
    assert bucket.uploads() == []


@pytest.mark.slow
def test_nothing_goes_on_after_the_deadline(bucket: Bucket) -> None:
    for fault in ("stall_up", "503"):
        bucket.breaks(UP, fault)
        with at_most(MOST_S), pytest.raises(StoreTimeout, match=r"cannot put part .*gave up after"):
            put(bucket, os.urandom(NBYTES), late=False, deadline=time.monotonic() + 1)
        num_requests = -1
        while num_requests != len(bucket.requests()):  # those that were on their way are seen
            num_requests = len(bucket.requests())
            time.sleep(0.3)
        time.sleep(2 * IDLE_S)
        assert len(bucket.requests()) == num_requests
        assert bucket.listed() == {}
        assert bucket.uploads() == []


@pytest.mark.parametrize(
    ("fault", "count"),
    [
        *[("reset_down", 1), ("stall_down", 1), ("truncate", 1), ("503", 3), ("refuse", 1)],
        pytest.param("hang_reply", 1, marks=pytest.mark.slow),
    ],
)
def test_a_get_goes_on_at_its_byte(bucket: Bucket, fault: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault not in ("stall_down", "hang_reply"):  # of the requests that count here, none is sent again for its time
        monkeypatch.setattr(io_limits, "IDLE_S", 150.0)
    data = os.urandom(NBYTES)
    bucket.store.put("p", b"", [data])
    after = {"after": HALF} if fault in ("reset_down", "stall_down", "truncate") else {}
    bucket.breaks(DOWN, fault, count, **after)
    into = bytearray(NBYTES - 100)
    bucket.store.get_into("p", 50, memoryview(into))
    assert into == data[50:-50]
    got = [request for request in bucket.requests() if request.op == "GetObject"]
    assert sum(request.fault is not None for request in got) == count
    assert len(got) == count + 1 or fault in ("stall_down", "hang_reply")
    if after:
        assert got[-1].range is not None
        least = 0 if fault == "reset_down" else HALF // 2  # a reset drops what a busy client has not read yet
        assert int(got[-1].range.removeprefix("bytes=").split("-")[0]) > 50 + least
    bucket.breaks(DOWN, fault, count, **after)
    assert bucket.store.get("p") == data
    bucket.breaks(DOWN, fault, count, **after)
    assert bucket.store.get("p", 3) == data[3:]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", ["stall_down", "503", "refuse", pytest.param("blackhole", marks=pytest.mark.slow)])
def test_a_get_gives_up(bucket: Bucket, fault: str) -> None:
    data = os.urandom(HALF)
    bucket.store.put("p", data)
    bucket.breaks(DOWN, fault)
    with at_most(MOST_S), pytest.raises(StoreTimeout, match=r"/p: cannot get: gave up after .* bytes"):
        bucket.store.get_into("p", 0, memoryview(bytearray(HALF)))
    with at_most(MOST_S), pytest.raises(StoreTimeout):
        bucket.store.get_into("p", 0, memoryview(bytearray(HALF)), deadline=time.monotonic() + 1)
    bucket.heals()
    assert bucket.store.get("p") == data


@pytest.mark.parametrize(("fault", "count"), [("503", 3), ("refuse", 1), ("truncate", 1), ("hang_reply", 1)])
def test_a_listing_outlasts_what_passes(
    bucket: Bucket, fault: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault != "hang_reply":
        monkeypatch.setattr(io_limits, "IDLE_S", 150.0)
    for n in range(3):
        bucket.store.put(f"steps/{n}", b"1")
    bucket.breaks("^List", fault, count)
    assert [entry.key for entry in bucket.store.scan("steps/")] == [f"steps/{n}" for n in range(3)]
    lists = [request for request in bucket.requests() if request.op.startswith("List")]
    assert sum(request.fault is not None for request in lists) == count
    assert len(lists) == count + 1 or fault == "hang_reply"


@pytest.mark.usefixtures("impatient")
def test_an_outage_is_no_empty_listing(bucket: Bucket) -> None:
    bucket.breaks("", "down")
    for call in (
        lambda: bucket.store.scan("steps/"),
        lambda: bucket.store.clean(0, is_known),
        lambda: bucket.store.delete("a"),
    ):
        with at_most(MOST_S), pytest.raises(StoreTimeout, match="gave up after"):
            call()


def test_rights_that_are_missing_are_told_at_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_limits, "IDLE_S", 60.0)  # of the requests that count here, none is sent again for its time
    bucket.store.put("p", b"1")
    bucket.breaks("", "403")
    before = len(bucket.requests())
    calls = [
        lambda: bucket.store.put("q", b"1"),
        lambda: put(bucket, bytes(NBYTES), late=True),
        lambda: bucket.store.scan(""),
        lambda: bucket.store.delete("p"),
        lambda: bucket.store.delete("p", "q"),
    ]
    for call in calls:
        with pytest.raises(StoreDenied, match=r"AccessDenied.*to load, they need s3:GetObject .*to save, s3:PutObject"):
            call()
    assert len(bucket.requests()) == before + len(calls)
    with pytest.raises(ObjectUnreadable, match="AccessDenied"):
        bucket.store.get("p")
    with pytest.raises(ObjectUnreadable):
        bucket.store.get("p", 0, 0)


def test_one_of_many_deletions_that_is_refused(bucket: Bucket) -> None:
    for n in range(5):
        bucket.store.put(f"a/{n}", b"1")
    bucket.breaks("^Delete", "500", 2)
    bucket.store.delete(*(f"a/{n}" for n in range(5)))
    assert bucket.listed() == {}


def test_an_iterator_that_raises_aborts_the_upload(bucket: Bucket) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(NBYTES)
        assert bucket.uploads() == ["p"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bucket.store.put("p", HEAD, pieces())
    assert bucket.uploads() == []
    assert bucket.listed() == {}


PACKS = [f"packs/000000000100-000003-aaaaaaaa/00000{rank}-25b4d951-000000.safetensors" for rank in range(2)]


def test_an_upload_that_somebody_aborts_is_told_with_what_may_have_done_so(bucket: Bucket) -> None:
    """As a lifecycle rule does, or who clears a bucket of uploads that look left behind."""

    def pieces() -> Iterator[bytes]:
        yield bytes(2 * PART_NBYTES)
        bucket.store.clean(time.time() + 60, lambda key: True)

    with pytest.raises(StoreError, match=r"p: cannot put.*NoSuchUpload.*did a lifecycle rule, or somebody, abort"):
        bucket.store.put("p", HEAD, pieces())
    assert bucket.listed() == {}


def test_clean_leaves_what_is_newer(bucket: Bucket) -> None:
    for pack in PACKS:
        bucket.begin_upload(pack)
    bucket.store.clean(time.time() - 3600, is_known)
    assert bucket.uploads() == PACKS
    bucket.store.clean(time.time() + 60, is_known)
    assert bucket.uploads() == []


def test_clean_leaves_what_others_upload_below_the_prefix(bucket: Bucket) -> None:
    """Data, and another root, whose saves may be under way for longer than a grace period of this one."""
    others = ["datasets/laion.tar", "packs/laion.tar", f"run1/{PACKS[0]}"]
    for key in (*others, *PACKS):
        bucket.begin_upload(key)
    bucket.store.clean(time.time() + 60, is_known)
    assert bucket.uploads() == others


def test_an_object_that_changes_while_it_is_read(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.store.put("p", os.urandom(NBYTES))
    bucket.breaks(DOWN, "truncate", 1, after=HALF)
    into = memoryview(bytearray(NBYTES))
    client = bucket.store._client  # type: ignore[attr-defined]
    real = client.send
    tries: list[str] = []

    async def send(operation: str, parameters: dict[str, object]) -> object:
        tries.append(operation)
        if len(tries) == 2:
            await real("put_object", {"Key": parameters["Key"], "Body": b"2" * NBYTES})
        return await real(operation, parameters)

    monkeypatch.setattr(client, "send", send)
    with pytest.raises(StoreError, match="changed while it was read"):
        bucket.store.get_into("p", 0, into)
