"""Whatever fsspec reaches: S3 of a server of this machine, and errors in every form."""

from __future__ import annotations

import errno
import socket
import sys
import threading
import time
import tracemalloc
import uuid
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry
from helpers.answering import Handler, Server
from helpers.objects import client_of
from helpers.s3 import SECRET, s3_options
from helpers.servers import ObjectStorage
from store_conformance import StoreConformance, keys

from ckptlib.errors import ObjectNotFound, ObjectUnreadable, StoreDenied, StoreError, StoreFull, StoreTimeout
from ckptlib.stores import LateHead, Store, fsspec_client, fsspec_listing, open_store
from ckptlib.stores.fsspec import FsspecStore


class TestFsspecMemory(StoreConformance):
    knows_sizes = False
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
    knows_sizes = False
    tells_existing = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FsspecStore(f"local://{tmp_path}/made/by/put", {})


def test_s3_multipart(s3: ObjectStorage) -> None:
    store = FsspecStore(s3.url(), s3.options())
    body = bytes(101 << 20)
    store.put("large", body)
    assert store.scan("")[0].nbytes == len(body)
    assert store.get("large") == body


@pytest.mark.parametrize("late", [False, True])
def test_what_is_put_is_held_once(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """As in a copy of a pack of a local root, which is not cut."""
    head, num_pieces, piece_nbytes = b"head", 64, 1 << 20
    peaks: list[int] = []

    def pipe_file(path: str, body: object) -> None:
        peaks.append(tracemalloc.get_traced_memory()[1])
        assert type(body) is bytes
        assert body == head + b"".join(bytes([n]) * piece_nbytes for n in range(num_pieces))

    with FsspecStore(f"memory://{uuid.uuid4().hex}", {}) as store:
        monkeypatch.setattr(client_of(store), "pipe_file", pipe_file)
        pieces = (bytes([n]) * piece_nbytes for n in range(num_pieces))
        tracemalloc.start()
        try:
            store.put("a", LateHead(len(head), lambda: head) if late else head, pieces)
        finally:
            tracemalloc.stop()
    assert peaks[0] < 1.25 * num_pieces * piece_nbytes


def test_s3_listing_of_many_pages(s3: ObjectStorage) -> None:
    store = FsspecStore(s3.url(), s3.options())
    client_of(store).req_kw = {"MaxKeys": 3}  # a page holds 1000 otherwise
    for n in range(10):
        store.put(f"a/{n}", b"")
    assert keys(store, "a/") == [f"a/{n}" for n in range(10)]


def test_an_outage_is_an_error_that_tells_no_secret() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening: refused
        options = s3_options(f"http://user:{SECRET}@127.0.0.1:{free.getsockname()[1]}")
        options["config_kwargs"] = {"retries": {"mode": "standard", "max_attempts": 1}}
        store = FsspecStore("s3://bucket/run", options)
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


def test_a_directory_that_other_ranks_make_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFTP says of one that is there that it cannot be made: here another rank is faster at each level of the path."""

    def makedirs(fs: LocalFileSystem, path: str, exist_ok: bool = False) -> None:
        missing = [level for level in reversed([Path(path), *Path(path).parents]) if not level.exists()]
        for level in missing:
            level.mkdir()
            raise OSError("Failure")

    monkeypatch.setattr(LocalFileSystem, "makedirs", makedirs)
    store = FsspecStore(f"local://{tmp_path}", {})
    store.put("packs/save/1", b"data")
    assert store.get("packs/save/1") == b"data"


def test_a_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def makedirs(fs: LocalFileSystem, path: str, exist_ok: bool = False) -> None:
        raise OSError("Failure")

    monkeypatch.setattr(LocalFileSystem, "makedirs", makedirs)
    with pytest.raises(StoreError, match="packs/save/1: cannot put: OSError: Failure"):
        FsspecStore(f"local://{tmp_path}", {}).put("packs/save/1", b"data")


def test_a_directory_that_vanishes_is_no_absent_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever puts does not hear that there is no such object, which means something else to him."""
    monkeypatch.setattr(LocalFileSystem, "makedirs", lambda fs, path, exist_ok=False: None)
    with pytest.raises(StoreError, match="packs/save/1: cannot put: FileNotFoundError") as caught:
        FsspecStore(f"local://{tmp_path}", {}).put("packs/save/1", b"data")
    assert not isinstance(caught.value, ObjectNotFound)


def test_a_scheme_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match=r"no filesystem for s4://; expected .* such as s3://bucket/run7") as caught:
        FsspecStore(f"s4://user:{SECRET}@host/run", {})
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "package", "extra"), [("gs://bucket/run", "gcsfs", "gcs"), ("az://container/run", "adlfs", "azure")]
)
def test_a_package_that_is_missing(url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)  # what it has imported
    with pytest.raises(ImportError, match=rf"needs a package: pip install 'ckptlib\[{extra}\]' \(.*{package}"):
        FsspecStore(url, {})


def test_a_server_that_is_not_there_as_the_store_is_opened() -> None:
    with pytest.raises(StoreTimeout, match=r"ftp://127.0.0.1:1/run: cannot be reached: ConnectionRefusedError") as told:
        FsspecStore(f"ftp://user:{SECRET}@127.0.0.1:1/run", {})
    assert SECRET not in str(told.value)


def test_credentials_of_another_kind() -> None:
    """As a file of gcloud in the place of one of a user's own."""
    pytest.importorskip("gcsfs")
    with pytest.raises(ValueError, match=r"for gs:// lacks an option, or what one names: .*'refresh_token'"):
        FsspecStore("gs://bucket/run", {"token": {"type": "x", "client_id": "i", "client_secret": SECRET}})


@pytest.mark.parametrize(
    ("url", "options", "lacks"),
    [
        ("dir://run", {}, "an option.*: AttributeError"),
        ("github://run", {}, "an option.*: TypeError: .* 'org' and 'repo'"),
        ("zip://run", {"fo": "/nowhere/run.zip"}, "what one names: FileNotFoundError: .*/nowhere/run.zip"),
    ],
)
def test_a_filesystem_that_cannot_be_made(url: str, options: dict[str, object], lacks: str) -> None:
    with pytest.raises(ValueError, match=rf"the filesystem for {url.partition('run')[0]} lacks .*{lacks}"):
        FsspecStore(url, options)


def test_a_filesystem_that_keeps_its_listings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hugging Face's, `hf://`, whose listings are in a plain dict."""

    class Keeping(LocalFileSystem):
        def __init__(self, **options: object) -> None:
            super().__init__(**options)
            self.dircache = {}

    monkeypatch.setattr(fsspec.core, "url_to_fs", lambda url, **options: (Keeping(), "/run"))
    with pytest.raises(ValueError, match=r"for keeping://, Keeping, keeps what it has listed.*fresh listings"):
        FsspecStore("keeping:///run", {})


def test_credentials_are_not_shown() -> None:
    store = FsspecStore(f"memory://user:{SECRET}@host/run", {})
    assert store.url == "memory://host/run"
    with pytest.raises(ObjectNotFound) as caught:
        store.get("a")
    assert SECRET not in str(caught.value)


def test_a_time_in_any_form(monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import datetime, timezone

    instant = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    forms = [
        {"LastModified": instant},
        {"last_modified": instant.replace(tzinfo=None)},
        {"updated": "2026-01-02T03:04:05Z"},
        {"mtime": instant.timestamp()},
        {"mtime": None, "created": int(instant.timestamp())},
    ]
    monkeypatch.setenv("TZ", "Asia/Kolkata")  # where a time without a zone, which is UTC, would be another
    time.tzset()
    try:
        assert {fsspec_listing._modified(info) for info in forms} == {instant.timestamp()}
    finally:
        monkeypatch.undo()
        time.tzset()


def test_calls_over_one_connection_are_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SFTP has one connection, whose client takes the answer to another thread's call for that to its own."""
    busy = threading.Lock()

    def alone(name: str) -> None:
        method = getattr(LocalFileSystem, name)

        def call(*asked: Any, **options: Any) -> object:
            assert busy.acquire(blocking=False)
            try:
                time.sleep(0.002)
                return method(*asked, **options)
            finally:
                busy.release()

        monkeypatch.setattr(LocalFileSystem, name, call)

    monkeypatch.setattr(fsspec_client, "_ONE_CONNECTION", ("local",))
    store = FsspecStore(f"local://{tmp_path}", {})
    store.put("a/0", b"0")
    for name in ("pipe_file", "cat_file", "ls"):
        alone(name)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda i: store.put(f"a/{i}", b"%d" % i), range(16)))
        assert list(threads.map(lambda i: store.get(f"a/{i}"), range(16))) == [b"%d" % i for i in range(16)]
        assert set(map(len, threads.map(store.scan, ["a/"] * 8))) == {16}


def test_who_waits_for_another_call_waits_until_his_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec_client, "_ONE_CONNECTION", ("local",))
    store, begun, go = FsspecStore(f"local://{tmp_path}", {}), threading.Event(), threading.Event()
    monkeypatch.setattr(LocalFileSystem, "cat_file", lambda *asked, **options: begun.set() or (go.wait(150) and b"1"))
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(store.get, "a")
        assert begun.wait(150)
        with pytest.raises(StoreTimeout, match=r"b: cannot put: no answer within \d+ s, for 1 bytes"):
            store.put("b", b"1", deadline=time.monotonic())
        go.set()
        assert other.result() == b"1"


def test_calls_over_many_connections_go_on_beside_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(8)

    def cat_file(*asked: object, **options: object) -> bytes:
        together.wait(150)
        return b"1"

    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)
    store = FsspecStore(f"local://{tmp_path}", {})
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(store.get, "abcdefgh")) == [b"1"] * 8


def test_an_archive_whose_names_begin_at_its_root(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.writestr("ckptlib.json", b"{}")
        archive.writestr("steps/1.json", b"1")
    store = open_store("zip://", {"fo": f"{tmp_path}/run.zip"})
    assert keys(store) == ["ckptlib.json", "steps/1.json"]
    assert keys(store, "steps/") == ["steps/1.json"]
    assert store.get("steps/1.json") == b"1"


def test_a_name_with_a_slash_too_many_is_no_key(tmp_path: Path) -> None:
    """As a copy to "run/" may make it: a step would be listed that nobody can read."""
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.writestr("run/steps/1.json", b"1")
        archive.writestr("run//steps/2.json", b"2")
    assert keys(open_store("zip://run", {"fo": f"{tmp_path}/run.zip"})) == ["steps/1.json"]


def test_web_pages_that_list_files_are_no_store() -> None:
    class Pages(Handler):
        def do_GET(self) -> None:
            self.answer(200, b'<a href="ckptlib.json">ckptlib.json</a>', Content_Type="text/html")

    with Server(Pages) as pages, pytest.raises(StoreError, match=r"/run/ckptlib.json is listed without a size"):
        FsspecStore(f"{pages.url}/run", {}).scan("")


def test_what_has_no_time_is_new() -> None:
    """What a sweep takes for old, it deletes."""
    before = time.time()
    assert before <= fsspec_listing._modified({"name": "bucket/a", "mtime": None}) <= time.time()


def test_a_directory_that_names_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ls = LocalFileSystem.ls

    def itself_too(fs: LocalFileSystem, path: str, detail: bool = False, **options: object) -> list:
        return [{"name": path, "size": 0, "type": "directory"}, *ls(fs, path, detail=detail, **options)]

    monkeypatch.setattr(LocalFileSystem, "ls", itself_too)
    store = FsspecStore(f"local://{tmp_path}", {})
    store.put("a/b/1", b"1")
    store.put("a/2", b"2")
    assert keys(store) == ["a/2", "a/b/1"]


def test_an_answer_that_is_too_short_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cat_file = FsspecStore(f"local://{tmp_path}", {}), LocalFileSystem.cat_file
    store.put("a", b"data")
    monkeypatch.setattr(LocalFileSystem, "cat_file", lambda *asked, **options: cat_file(*asked, **options)[:-1])
    for offset, nbytes, count in ((0, 4, 4), (1, 2, 2), (3, None, 1)):
        with pytest.raises(StoreError, match=f"cannot get: expected {count} bytes from {offset}, got {count - 1}"):
            store.get("a", offset, nbytes)
    into = bytearray(b"....")
    with pytest.raises(StoreError, match="expected 4 bytes from 0, got 3"):
        store.get_into("a", 0, memoryview(into))
    assert into == b"...."


def test_a_file_that_vanishes_while_its_directory_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are there: a listing without them would take a step for one that was never saved."""
    store, ls, num = FsspecStore(f"local://{tmp_path}", {}), LocalFileSystem.ls, 0
    for name in ("a", "b", "c"):
        store.put(f"d/{name}", b"1")

    def vanishing(fs: LocalFileSystem, path: str, detail: bool = False, **options: object) -> object:
        nonlocal num
        num += 1
        if num == 2:  # of the first file that it asks about in this directory
            (tmp_path / "d" / "b").unlink()
            raise FileNotFoundError(f"{path}/b")
        return ls(fs, path, detail=detail, **options)

    monkeypatch.setattr(LocalFileSystem, "ls", vanishing)
    assert keys(store) == ["d/a", "d/c"]
    assert num > 2


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
        (TimeoutError(), StoreTimeout),
        (ConnectionResetError(), StoreError),
    ],
    ids=repr,
)
def test_an_object_that_may_not_be_read_is_told_from_a_store_in_trouble(
    error: Exception, expected: type[StoreError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(fsspec_client, "RETRY_S", 0.0)
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
        assert type(caught.value) is (StoreDenied if expected is ObjectUnreadable else expected)
