"""What a store on S3 promises beyond the contract that all stores share: creation, sums, errors, memory, waits."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.s3_bucket import PART_NBYTES, at_most, bucket_of, scale_limits
from helpers.servers import SECRET, ObjectStorage, s3_client, start_seaweedfs
from places import ROOT

from ckptlib.errors import ObjectExists, ObjectNotFound, StoreDenied, StoreError, StoreTimeout
from ckptlib.stores import Store, open_store
from ckptlib.stores import s3_client as client_module
from ckptlib.stores.fault_proxy import Rule
from ckptlib.stores.fsspec import FsspecStore
from ckptlib.stores.s3 import S3Store, start_after

ROUNDS = 200


@pytest.mark.parametrize("scheme", ["s3", "s3a"])
def test_it_is_chosen_by_its_scheme(s3: ObjectStorage, scheme: str) -> None:
    url = s3.url().replace("s3:", f"{scheme}:")
    with open_store(url, s3.options()) as store:
        assert isinstance(store, S3Store)
        assert store.url == url
        store.put("a", b"1")
    with open_store(url.replace("s3a:", "s3:"), s3.options()) as store:
        assert store.get("a") == b"1"


def test_the_client_that_is_named(s3: ObjectStorage) -> None:
    with open_store(s3.url(), {**s3.options(), "client": "s3fs"}) as store:
        assert isinstance(store, S3Store)
    with open_store(s3.url(), {**s3.options(), "client": "fsspec"}) as store:
        assert isinstance(store, FsspecStore)
    with pytest.raises(ValueError, match="client 's3fs' reaches S3; expected s3://"):
        open_store("gs://bucket/run", {"client": "s3fs"})


# -- creation


def test_of_two_who_create_one_wins(s3: ObjectStorage) -> None:
    """Threads of one process, with a store each; the server alone decides."""
    url = s3.url()
    start = threading.Barrier(2)

    def job(me: bytes) -> list[bool]:
        won = []
        with open_store(url, s3.options()) as store:
            for n in range(ROUNDS):
                start.wait(60)
                try:
                    store.put(f"roots/{n}", me, create=True)
                    won.append(True)
                except ObjectExists:
                    won.append(False)
        return won

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(job, [b"a", b"b"])
    assert all(one != other for one, other in zip(first, second, strict=True))
    with open_store(url, s3.options()) as store:
        assert [store.get(f"roots/{n}") for n in range(ROUNDS)] == [b"a" if won else b"b" for won in first]


@pytest.mark.parametrize("nbytes", [10, 2 * PART_NBYTES])
@pytest.mark.parametrize("fault", ["lost_reply", "503"])
def test_who_created_it_and_was_not_told(
    s3: ObjectStorage, monkeypatch: pytest.MonkeyPatch, nbytes: int, fault: str
) -> None:
    scale_limits(monkeypatch)
    data = os.urandom(nbytes)
    with bucket_of(s3) as bucket:
        bucket.breaks("^(PutObject|CompleteMultipartUpload) ", fault, 1)
        bucket.store.put("a", data, create=True)
        for other in (os.urandom(nbytes), data):
            bucket.breaks("^(PutObject|CompleteMultipartUpload) ", fault, 1 if other != data else 0)
            with pytest.raises(ObjectExists, match="/a: exists already"):
                bucket.store.put("a", other, create=True)
        assert bucket.bytes_of("a") == data
        assert bucket.uploads() == []


def test_who_created_it_and_looks_for_it_over_a_bad_network(s3: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_limits(monkeypatch)
    with bucket_of(s3) as bucket:
        lost: Rule = {"match": "^PutObject ", "fault": "lost_reply", "count": 1}
        bucket.proxy.rules([lost, {"match": "^GetObject ", "fault": "truncate", "count": 1, "after": 7}])
        bucket.store.put("a", b"ten bytes.", create=True)
        assert [request.op for request in bucket.requests()] == ["PutObject", "PutObject", "GetObject", "GetObject"]
        assert bucket.bytes_of("a") == b"ten bytes."


# -- sums


@pytest.mark.parametrize(("server", "expected"), [("s3", {"ChecksumCRC32"}), ("juicefs", {"ContentMD5"})])
def test_the_sum_that_a_server_knows(request: pytest.FixtureRequest, server: str, expected: set[str]) -> None:
    storage: ObjectStorage = request.getfixturevalue(server)
    with S3Store(storage.url(), storage.options()) as store:
        assert store._client.sums._kinds == {"ChecksumCRC32", "ContentMD5"}
        store.put("a", b"1")
        assert store._client.sums._kinds == expected


def test_a_user_who_wants_payloads_signed(s3: ObjectStorage) -> None:
    options = {**s3.options(), "config_kwargs": {"s3": {"payload_signing_enabled": True}}}
    data = os.urandom(PART_NBYTES)
    with open_store(s3.url(), options) as store:
        store.put("a", data[:100], [data[100:3000], data[3000:]])
        assert store.get("a") == data


# -- listings

WORDS = ["".join(word) for size in range(1, 5) for word in itertools.product("ab-/", repeat=size)]
KEYS = [word for word in WORDS if all(part[:1] not in ("", "-") for part in word.split("/"))]


@pytest.mark.parametrize("prefix", ["", "a", "a/"])
def test_a_listing_begins_early_enough_in_either_order(prefix: str) -> None:
    """Every key that is wanted is one that a server gives: by bytes, or by directories as SeaweedFS does."""
    for after in [*KEYS, *(f"{key}/" for key in KEYS)]:
        start = start_after(prefix, after)
        assert start == "" or start.startswith(prefix)
        for key in KEYS:
            if start and key.startswith(prefix) and key > after:
                assert key > start
                assert key.split("/") > start.split("/")
                assert not key.startswith(start.rstrip("/") + "/") or start.endswith("/")


def test_directories_that_sort_otherwise_than_keys(s3: ObjectStorage, juicefs: ObjectStorage) -> None:
    names = ["d/a-1/x", "d/a-1/y", "d/a.1", "d/a/x", "d/a/y", "d/a0", "d/b"]
    for storage in (s3, juicefs):
        with open_store(storage.url(), storage.options()) as store:
            for name in names:
                store.put(name, b"")
            for prefix in ("", "d", "d/"):
                for after in ["", *names, "d/a", "d/a-", "d/a/", "d/zz", "a", "z"]:
                    found = [entry.key for entry in store.scan(prefix, after)]
                    assert found == [name for name in names if name > after], (prefix, after)


def test_listings_and_deletions_of_many_pages(
    s3: ObjectStorage, juicefs: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptlib.stores.io_limits.PAGE_KEYS", 7)
    for storage in (s3, juicefs):
        with open_store(storage.url(), storage.options()) as store:
            names = [f"{directory}/{n:03d}" for directory in ("a", "b/c") for n in range(25)]
            with ThreadPoolExecutor(8) as threads:
                list(threads.map(lambda name: store.put(name, b""), names))
            assert [entry.key for entry in store.scan("")] == names
            assert [entry.key for entry in store.scan("b/c/", "b/c/010")] == names[36:]
            store.delete(*names[:40])
            assert [entry.key for entry in store.scan("")] == names[40:]


def test_what_is_no_key_is_not_listed(s3: ObjectStorage) -> None:
    url, oracle = s3.url(), s3_client(s3)
    prefix = url.split("/", 3)[3]
    for name in ("a/", "a/b", "a/.hidden", "a/c d"):
        oracle.put_object(Bucket=s3.bucket, Key=f"{prefix}/{name}", Body=b"")
    with open_store(url, s3.options()) as store:
        assert [entry.key for entry in store.scan("")] == ["a/b"]
        with pytest.raises(ObjectNotFound):
            store.get("a")


# -- errors


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"key": "nobody"}, "InvalidAccessKeyId.*does not know this access key"),
        ({"secret": "wrong-secret-of-mine"}, "SignatureDoesNotMatch.*does not belong to the access key"),
        ({"bucket": "no-such-bucket"}, "NoSuchBucket.*correct the URL, or make the bucket"),
        ({"profile": "no-such-profile"}, "ProfileNotFound.*give key and secret"),
        ({"region": "us-east-1"}, "'region'.*; correct storage_options: .* client_kwargs={'region_name'"),
        ({"endpoint_url": "127.0.0.1:9"}, "Invalid endpoint.* correct storage_options: .*with http://"),
    ],
)
def test_what_somebody_must_change_is_told_at_once(s3: ObjectStorage, options: dict[str, str], told: str) -> None:
    url = s3.url().replace("/ckpt/", f"/{options.get('bucket', 'ckpt')}/")
    given = {**s3.options(), **{name: value for name, value in options.items() if name != "bucket"}}
    if "profile" in options:
        del given["key"], given["secret"]
    with open_store(url, given) as store:
        for call in (
            lambda: store.put("a", b"1"),
            lambda: store.put("a", b"", [bytes(17 << 20)]),
            lambda: store.get("a"),
            lambda: store.scan(""),
            lambda: store.delete("a"),
            lambda: store.clean(0, lambda key: True),
        ):
            with pytest.raises(StoreDenied, match=told) as caught:
                call()
            shown = f"{caught.value} {caught.value.__cause__}"
            assert "wrong-secret-of-mine" not in shown
            assert SECRET not in shown


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("http://127.0.0.1:9", "nobody listens there"),
        ("http://no-such-host.invalid", "the name of the server is not known here"),
    ],
)
def test_a_server_that_is_not_there(endpoint: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_limits(monkeypatch, retry_s=1.0)
    for place, anon, expected in (
        (endpoint, False, told),
        (endpoint.replace("//", f"//user:{SECRET}@"), True, "gave up"),
    ):
        with (
            open_store("s3://bucket/run", {"endpoint_url": place, "anon": anon, "key": "a", "secret": "b"}) as store,
            pytest.raises(StoreTimeout, match=expected) as caught,
        ):
            store.scan("steps/")
        assert SECRET not in f"{caught.value} {caught.value.__cause__}"


@pytest.mark.slow
def test_a_server_that_is_killed_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scale_limits(monkeypatch, retry_s=60.0)
    data = os.urandom(6 * PART_NBYTES)
    with start_seaweedfs(tmp_path) as storage, open_store(storage.url(), storage.options()) as store:

        def pieces() -> Iterator[memoryview]:
            view = memoryview(data)
            yield view[: 3 * PART_NBYTES]
            storage.process.kill()
            back = threading.Timer(1.0, storage.process.start)
            back.start()
            yield view[3 * PART_NBYTES :]

        store.put("a", b"head", pieces())
        assert store.get("a") == b"head" + data


# -- waits, processes and memory


def test_a_loop_that_is_blocked(s3: ObjectStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Store(s3.url(), s3.options()) as store:
        store.put("a", b"1")
        free = threading.Event()
        store._client._fs.loop.call_soon_threadsafe(free.wait, 150)
        with monkeypatch.context() as blocked:  # only then: a busy machine may take as long for what is well
            blocked.setattr(client_module, "_LOOP_S", 0.5)
            with at_most(30), pytest.raises(StoreTimeout, match="event loop has not answered"):
                store.get("a")
            with at_most(30), pytest.raises(StoreTimeout, match="event loop has not answered"):
                store.put("b", b"", [bytes(17 << 20)], deadline=time.monotonic())
        free.set()
        assert store.get("a") == b"1"


def test_a_forked_child_is_refused(s3: ObjectStorage) -> None:
    with open_store(s3.url(), s3.options()) as store:
        store.put("a", b"1")
        child = os.fork()
        if not child:
            signal.alarm(30)
            try:
                store.get("a")
            except StoreError as error:
                os._exit(0 if "after a fork" in str(error) else 2)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert store.get("a") == b"1"


def test_several_threads_and_a_store_that_is_closed(s3: ObjectStorage) -> None:
    store: Store = open_store(s3.url(), s3.options())
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda n: store.put(f"p/{n}", b"h", [bytes(17 << 20)]), range(4)))
    assert [entry.nbytes for entry in store.scan("p/")] == [(17 << 20) + 1] * 4
    store.close()
    store.close()


MEMORY = """
import mmap, sys
from ckptlib.stores import LateHead, open_store
nbytes = 256 << 20
with open("/proc/self/status") as status: pass
def anonymous(name):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))
store = open_store(sys.argv[1], {"key": sys.argv[2], "secret": sys.argv[3], "endpoint_url": sys.argv[4]})
store.put("first", b"", [bytes(1 << 20)])
with open(sys.argv[5], "r+b") as file:
    slot = memoryview(mmap.mmap(file.fileno(), nbytes))
before = anonymous("RssAnon")
peak = before
def pieces():
    global peak
    for start in range(0, nbytes, 5 << 20):
        peak = max(peak, anonymous("RssAnon"))
        yield slot[start : start + (5 << 20)]
def head():
    global peak
    peak = max(peak, anonymous("RssAnon"))
    return b"h" * 4096
store.put("object", LateHead(4096, head), pieces())
print(peak - before)
"""


def test_memory_of_a_large_put(s3: ObjectStorage, tmp_path: Path) -> None:
    """Parts are sent from the slot: what is there beside it does not grow with the object."""
    with open("/dev/urandom", "rb") as noise, open(tmp_path / "slot", "wb") as slot:
        slot.write(noise.read(1 << 20) * 256)
    arguments = [s3.url(), str(s3.secrets["key"]), str(s3.secrets["secret"]), s3.endpoint, str(tmp_path / "slot")]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48 << 20
