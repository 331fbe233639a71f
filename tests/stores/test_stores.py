"""Every store against the contract, and what is particular to each."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import fsspec
import pytest
from helpers.objects import client_of, wrapped_by
from store_conformance import PAGE_NBYTES, StoreConformance, keys, pages

from ckptlib.errors import ObjectExists, ObjectNotFound, ObjectUnreadable, StoreError, StoreFull
from ckptlib.stores import Store, absolute, local, open_store, remote
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.remote import FsspecStore
from ckptlib.stores.testing import FaultStore, LatencyStore, flip_bit, truncate

SECRET = "s3cr3t-of-the-tests"


# -- local


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(str(tmp_path / "made" / "by" / "put"))


class TestLocalStoreWithoutDirectIO(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(local, "_O_DIRECT", 0)
        return LocalStore(str(tmp_path))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "root"


def temp_files(root: Path) -> list[str]:
    return os.listdir(root / ".tmp")


def test_nothing_is_made_before_the_first_put(files: Path) -> None:
    store = LocalStore(str(files))
    assert store.scan("") == []
    store.delete("a")
    assert not files.exists()


def test_objects_are_plain_files_and_temporary_ones_are_gone(files: Path) -> None:
    store = LocalStore(str(files))
    store.put("a/b", b"1")
    with store.upload("a/c", 4) as upload:
        upload.write(b"body")
        assert len(temp_files(files)) == 1
        assert keys(store) == ["a/b"]
        upload.commit(b"head")
    assert (files / "a" / "c").read_bytes() == b"headbody"
    assert temp_files(files) == []
    assert os.stat(files / "a" / "c").st_nlink == 1


def test_whole_pages_go_past_the_page_cache(files: Path) -> None:
    memory = pages(2)
    with LocalStore(str(files)).upload("p", PAGE_NBYTES) as upload:
        assert isinstance(upload, local._LocalUpload)
        upload.write(memory)
        direct = upload._direct_fd is not None
        upload.commit(bytes(PAGE_NBYTES))
    if not upload._may_direct:
        pytest.skip("this file system refuses O_DIRECT")
    assert direct


def test_slices_of_a_large_buffer(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "SLICE_NBYTES", PAGE_NBYTES)
    memory = pages(5)
    store = LocalStore(str(files))
    for key, body in [("direct", memoryview(memory)), ("buffered", memoryview(memory)[1:])]:
        with store.upload(key, PAGE_NBYTES) as upload:
            upload.write(body)
            upload.commit(bytes(PAGE_NBYTES))
        assert store.get(key, PAGE_NBYTES) == bytes(body)


def test_foreign_files_are_not_objects(files: Path) -> None:
    store = LocalStore(str(files))
    store.put("a/b", b"1")
    (files / "a" / ".nfs0001").write_bytes(b"")
    (files / "a" / "with blank").write_bytes(b"")
    (files / "lost+found").mkdir(mode=0o000)
    (files / "loop").symlink_to(files)
    (files / "link").symlink_to(files / "a" / "b")
    assert keys(store) == ["a/b"]


def test_delete_removes_empty_directories(files: Path) -> None:
    store = LocalStore(str(files))
    store.put("a/b/c/1", b"")
    store.put("a/2", b"")
    store.delete("a/b/c/1")
    assert os.listdir(files / "a") == ["2"]
    store.delete("a/2")
    assert os.listdir(files) == [".tmp"]


def test_the_parent_of_a_key_cannot_be_an_object(files: Path) -> None:
    store = LocalStore(str(files))
    store.put("a", b"1")
    with pytest.raises(StoreError, match="a/b: cannot publish") as caught:
        store.put("a/b", b"2")
    assert not isinstance(caught.value, ObjectExists)
    assert temp_files(files) == []


def test_a_directory_that_cannot_be_listed_is_an_error() -> None:
    script = """
import os, sys
from ckptlib.errors import StoreError
from ckptlib.stores.local import LocalStore
if os.geteuid() == 0:
    os.setuid(65534)
for prefix in ["", "steps/", "steps/0"]:
    try:
        sys.exit(f"listed {LocalStore(sys.argv[1]).scan(prefix)}")
    except StoreError as error:
        assert "steps: cannot list: Permission denied" in str(error).replace("/:", ":"), error
"""
    with tempfile.TemporaryDirectory() as root:  # pytest's own cannot be entered by others
        os.chmod(root, 0o755)
        os.mkdir(f"{root}/steps", 0o000)
        subprocess.run([sys.executable, "-c", script, root], check=True)


def test_a_file_system_without_links(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str, **directories: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    store = LocalStore(str(files))
    store.put("a/b", b"1")
    with pytest.raises(ObjectExists):
        store.put("a/b", b"2")
    assert store.get("a/b") == b"1"
    assert temp_files(files) == []


def test_a_killed_upload_leaves_no_object(files: Path) -> None:
    script = """
import mmap, os, signal, sys
from ckptlib.stores import open_store
upload = open_store(sys.argv[1]).upload("packs/p", 4096)
upload.write(mmap.mmap(-1, 1 << 20))
upload.write(b"tail")
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = subprocess.run([sys.executable, "-c", script, str(files)], check=False)
    assert run.returncode == -signal.SIGKILL
    store = LocalStore(str(files))
    assert store.scan("") == []
    assert len(temp_files(files)) == 1  # a file that no listing shows
    store.put("packs/p", b"again")
    assert keys(store) == ["packs/p"]


def test_only_old_remains_are_cleaned(files: Path) -> None:
    store = LocalStore(str(files))
    store.clean(before=time.time())  # no remains, no root: nothing to do
    store.put("a", b"kept")
    for name, age_s in ((f"1-{'0' * 16}", 1000), (f"2-{'f' * 16}", 0)):
        (files / ".tmp" / name).write_bytes(b"half a pack")
        os.utime(files / ".tmp" / name, (time.time() - age_s,) * 2)
    store.clean(before=time.time() - 500)
    assert temp_files(files) == [f"2-{'f' * 16}"]
    assert store.get("a") == b"kept"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", path], check=True)


@pytest.mark.root
@pytest.mark.parametrize("first", [0, 1], ids=["direct", "buffered"])
def test_a_full_disk(small_disk: Path, first: int) -> None:
    store = LocalStore(str(small_disk / "root"))
    store.put("a", b"1")
    memory = memoryview(pages(512))[first:]
    with store.upload("p", PAGE_NBYTES) as upload:
        with pytest.raises(StoreFull, match=rf"root/p: cannot write {memory.nbytes} bytes: .* bytes are free"):
            upload.write(memory)
        with pytest.raises(ValueError, match="over"):
            upload.commit(bytes(PAGE_NBYTES))
    assert keys(store) == ["a"]
    assert temp_files(small_disk / "root") == []
    with pytest.raises(StoreFull):
        store.put("b", memory)
    store.put("c", memory[: 256 << 10])
    assert keys(store) == ["a", "c"]


# -- memory


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore()


def test_a_name_is_shared_within_the_process() -> None:
    name = uuid.uuid4().hex
    open_store(f"memory://{name}").put("a", b"1")
    assert open_store(f"memory://{name}").get("a") == b"1"
    assert MemoryStore(name).scan("") == []


# -- fsspec


class TestFsspecMemory(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        name = uuid.uuid4().hex
        with FsspecStore(f"memory://{name}/run", {}) as store:
            yield store
        fs = fsspec.filesystem("memory")
        if fs.exists(f"/{name}"):
            fs.rm(f"/{name}", recursive=True)


class TestFsspecLocal(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FsspecStore(f"local://{tmp_path}/made/by/put", {})


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        endpoint = f"http://127.0.0.1:{port}"
        while not _answers(port):
            assert server.poll() is None, "moto's server did not start"
            time.sleep(0.05)
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **S3_KEYS)
        client.create_bucket(Bucket="bucket")
        yield endpoint
    finally:
        server.terminate()
        server.wait(30)


S3_KEYS = {"aws_access_key_id": "testing", "aws_secret_access_key": SECRET}


def s3_options(endpoint: str) -> dict[str, object]:
    return {"key": "testing", "secret": SECRET, "endpoint_url": endpoint}


class TestS3(StoreConformance):
    tells_existing = False

    @pytest.fixture
    def store(self, s3_endpoint: str) -> Store:
        return open_store(f"s3://bucket/{uuid.uuid4().hex}", s3_options(s3_endpoint))


def test_s3_multipart(s3_endpoint: str) -> None:
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}", s3_options(s3_endpoint))
    body = bytes(101 << 20)
    store.put("large", body)
    assert store.scan("")[0].nbytes == len(body)
    assert store.get("large") == body


def test_s3_listing_of_many_pages(s3_endpoint: str) -> None:
    store = open_store(f"s3://bucket/{uuid.uuid4().hex}", s3_options(s3_endpoint))
    client_of(store).req_kw = {"MaxKeys": 3}  # a page holds 1000 otherwise
    for n in range(10):
        store.put(f"a/{n}", b"")
    assert keys(store, "a/") == [f"a/{n}" for n in range(10)]


def test_a_missing_bucket_is_not_an_empty_store(s3_endpoint: str) -> None:
    store = open_store("s3://no-such-bucket/run", s3_options(s3_endpoint))
    for prefix in ["", "steps/"]:
        with pytest.raises(StoreError, match="no such bucket"):
            store.scan(prefix)
    with pytest.raises(StoreError, match="no such bucket"):
        store.put("a", b"1")
    with pytest.raises(StoreError, match="no such bucket"):
        store.scan("")  # the put made none


def test_an_outage_is_an_error_that_tells_no_secret() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: refused
        options = s3_options(f"http://user:{SECRET}@127.0.0.1:{free.getsockname()[1]}")
        options["config_kwargs"] = {"retries": {"mode": "standard", "max_attempts": 1}}
        store = open_store("s3://bucket/run", options)
        client_of(store).retries = 1
        calls = [
            ("list", lambda: store.scan("a")),
            ("get", lambda: store.get("a")),
            ("put", lambda: store.put("a", b"1")),
            ("delete", lambda: store.delete("a")),
        ]
        for doing, call in calls:
            with pytest.raises(StoreError, match=f"s3://bucket/run/a: cannot {doing}: ") as caught:
                call()
            assert not isinstance(caught.value, ObjectNotFound)
            assert SECRET not in str(caught.value)
            assert caught.value.__cause__ is None or SECRET not in str(caught.value.__cause__)


def test_a_full_disk_behind_fsspec() -> None:
    with pytest.raises(StoreFull, match="cannot put 5 bytes: No space"):
        FsspecStore("local:///dev", {}).put("full", b"12345")


def test_credentials_are_not_shown() -> None:
    store = FsspecStore(f"memory://user:{SECRET}@host/run", {})
    assert store.url == "memory://host/run"
    with pytest.raises(ObjectNotFound) as caught:
        store.get("a")
    assert SECRET not in str(caught.value)


def test_a_time_in_any_form() -> None:
    from datetime import datetime, timezone

    instant = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    forms = [
        {"LastModified": instant},
        {"last_modified": instant.replace(tzinfo=None)},
        {"updated": "2026-01-02T03:04:05Z"},
        {"mtime": instant.timestamp()},
        {"mtime": None, "created": int(instant.timestamp())},
    ]
    assert {remote._modified(info) for info in forms} == {instant.timestamp()}


class Refusal(Exception):
    """What a client raises that knows nothing of OSError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status_code = status


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PermissionError("Access Denied"), ObjectUnreadable),
        (Refusal(403), ObjectUnreadable),
        (Refusal(503), StoreError),
        (OSError(errno.EREMOTEIO, "We encountered an internal error"), StoreError),
        (OSError(errno.EBUSY, "Please reduce your request rate"), StoreError),
        (TimeoutError(), StoreError),
        (ConnectionResetError(), StoreError),
    ],
    ids=repr,
)
def test_an_object_that_may_not_be_read_is_told_from_a_store_in_trouble(
    error: Exception, expected: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    with FsspecStore(f"memory://{uuid.uuid4().hex}", {}) as store:
        store.put("a", b"data")
        monkeypatch.setattr(client_of(store), "cat_file", fail)
        monkeypatch.setattr(client_of(store), "pipe_file", fail)
        for call in (lambda: store.get("a"), lambda: store.get_into("a", 0, memoryview(bytearray(4)))):
            with pytest.raises(StoreError) as caught:
                call()
            assert type(caught.value) is expected
        with pytest.raises(StoreError) as caught:
            store.put("b", b"")
        assert type(caught.value) is StoreError


# -- open_store


def test_a_path_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in [
        str(tmp_path / "run"),
        "run",
        "./run/",
        f"file://{tmp_path}/run",
        "file://run",
        f"local://{tmp_path}/run",
    ]:
        assert open_store(url).url == absolute(url) == f"file://{tmp_path}/run"
    with pytest.raises(ValueError, match="needs a path"):
        open_store(absolute(""))
    assert absolute("s3://bucket/run") == "s3://bucket/run"


def test_stores_do_not_import_torch_or_fsspec(tmp_path: Path) -> None:
    script = """
import sys
from ckptlib.stores import open_store
open_store(sys.argv[1]).scan("")
open_store("memory://x")
assert not {"torch", "fsspec", "s3fs"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


# -- ckptlib.testing


class TestLatencyStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"latency+file://{tmp_path}?latency=0.0001")


class TestFaultStoreWithoutFaults(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(f"fault+file://{tmp_path}/run?plan={tmp_path}/plan.json")


def faulty(tmp_path: Path, *rules: dict[str, object]) -> Store:
    (tmp_path / "plan.json").write_text(json.dumps(rules))
    return open_store(f"fault+file://{tmp_path}/run?plan={tmp_path}/plan.json")


def test_wrappers_nest(tmp_path: Path) -> None:
    store = open_store(f"latency+fault+file://{tmp_path}/run?plan={tmp_path}/plan.json&latency=0")
    assert isinstance(store, LatencyStore)
    assert isinstance(wrapped_by(store), FaultStore)
    assert store.url == f"latency+fault+file://{tmp_path}/run"
    with pytest.raises(ValueError, match="latency="):
        open_store("latency+memory://x")


def test_the_nth_operation_fails(tmp_path: Path) -> None:
    store = faulty(tmp_path, {"op": "put", "key": "^a/", "nth": 1, "action": "error"})
    store.put("b/0", b"")
    store.put("a/1", b"")
    with pytest.raises(StoreError, match="as planned"):
        store.put("a/2", b"")
    faulty_again = open_store(f"fault+file://{tmp_path}/run?plan={tmp_path}/plan.json")
    faulty_again.put("a/3", b"")
    assert keys(store) == ["a/1", "a/3", "b/0"]
    log = [json.loads(line) for line in (tmp_path / "plan.json.log").read_text().splitlines()]
    assert [(line["n"], line["op"], line["key"], line["fault"]) for line in log] == [
        (0, "put", "b/0", None),
        (1, "put", "a/1", None),
        (2, "put", "a/2", "error"),
        (3, "put", "a/3", None),
        (4, "scan", "", None),
    ]
    assert {line["pid"] for line in log} == {os.getpid()}


def test_a_plan_may_change(tmp_path: Path) -> None:
    store = faulty(tmp_path, {"op": "commit", "action": "full"})
    with pytest.raises(StoreFull), store.upload("a", 0) as upload:
        upload.commit(b"")
    assert keys(store) == []
    faulty(tmp_path)
    with store.upload("a", 0) as upload:
        upload.commit(b"")
    assert keys(store) == ["a"]


def test_flip_and_stall(tmp_path: Path) -> None:
    store = faulty(tmp_path, {"op": "put", "action": "flip"}, {"op": "get", "action": "stall", "seconds": 0.01})
    store.put("a", b"1234")
    assert store.get("a") == b"1224"


@pytest.mark.parametrize(("action", "kept"), [("kill-before", []), ("kill-after", ["a"])])
def test_kill_and_once(tmp_path: Path, action: str, kept: list[str]) -> None:
    store = faulty(tmp_path, {"op": "commit", "action": action, "once": True})
    script = """
import sys
from ckptlib.stores import open_store
with open_store(sys.argv[1]).upload(sys.argv[2], 0) as upload:
    upload.write(b"data")
    upload.commit(b"")
"""
    url = f"fault+file://{tmp_path}/run?plan={tmp_path}/plan.json"
    assert subprocess.run([sys.executable, "-c", script, url, "a"], check=False).returncode == -signal.SIGKILL
    assert keys(store) == kept
    subprocess.run([sys.executable, "-c", script, url, "b"], check=True)
    assert keys(store) == [*kept, "b"]


@pytest.mark.parametrize(
    "rule",
    [
        {"op": "comit", "action": "error"},
        {"op": "put", "action": "die"},
        {"op": "get", "action": "flip"},
        {"op": "get", "action": "stall"},
        {"op": "put", "action": "error", "nht": 1},
    ],
)
def test_a_wrong_rule_is_refused(tmp_path: Path, rule: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rule|flipped|stall"):
        faulty(tmp_path, rule)


def test_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\x00\x00\x00")
    flip_bit(path, 1)
    flip_bit(path, -1)
    assert path.read_bytes() == b"\x00\x01\x01"
    truncate(path, 2)
    assert path.read_bytes() == b"\x00\x01"
