"""Local files: plain ones, put whole or not at all, past the page cache where that can be."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.tmpfs import mounted
from store_conformance import PAGE_NBYTES, StoreConformance, keys, pages

from ckptlib.errors import FormatError, ObjectExists, StoreError, StoreFull
from ckptlib.pages import PAGE_BYTES
from ckptlib.stores import LateHead, Store, local, local_direct, local_upload
from ckptlib.stores.local import LocalStore


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(str(tmp_path / "made" / "by" / "put"))


class TestLocalStoreWithoutDirectIO(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(local_upload, "O_DIRECT", 0)
        monkeypatch.setattr(local_direct, "O_DIRECT", 0)
        return LocalStore(str(tmp_path))


class TestLocalStoreThatIsReadOnce(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(local_direct, "FROM_BYTES", 1)
        monkeypatch.setattr(local_direct, "_is_cached", lambda *asked: False)
        store = LocalStore(str(tmp_path))
        store.reads_once = True
        return store


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

    def head() -> bytes:
        assert len(temp_files(files)) == 1
        assert keys(store) == ["a/b"]
        return b"head"

    store.put("a/c", LateHead(4, head), [b"body"])
    assert (files / "a" / "c").read_bytes() == b"headbody"
    assert temp_files(files) == []
    assert os.stat(files / "a" / "c").st_nlink == 1


def test_a_file_that_is_cut_as_it_is_read(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the look at its size: what is not there any more is not taken for read."""
    store, checked = LocalStore(str(files)), local.range_nbytes

    def cut(*asked: Any) -> int:
        nbytes = checked(*asked)
        os.truncate(files / "a", 3)
        return nbytes

    for read in (lambda: store.get("a"), lambda: store.get_into("a", 1, memoryview(bytearray(7)))):
        store.put("a", b"12345678")
        monkeypatch.setattr(local, "range_nbytes", cut)
        with pytest.raises(FormatError, match=r"a: the object has 3 bytes, expected bytes .*; it is truncated"):
            read()
        monkeypatch.undo()
        store.delete("a")


def test_whole_pages_go_past_the_page_cache(files: Path) -> None:
    memory = pages(2)
    with local_upload.LocalUpload(str(files), "p", PAGE_NBYTES) as upload:
        upload.write(memory)
        direct = upload._direct_fd is not None
        upload.commit(memoryview(bytes(PAGE_NBYTES)))
    if not upload._may_direct:
        pytest.skip("this file system refuses O_DIRECT")
    assert direct


def test_slices_of_a_large_buffer(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_upload, "SLICE_NBYTES", PAGE_NBYTES)
    memory = pages(5)
    store = LocalStore(str(files))
    for key, body in [("direct", memoryview(memory)), ("buffered", memoryview(memory)[1:])]:
        store.put(key, bytes(PAGE_NBYTES), [body])
        assert store.get(key, PAGE_NBYTES) == bytes(body)


def test_directories_before_the_first_key_are_not_opened(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a request of its own on a shared file system, and there is one for each step."""
    store, opened, scandir = LocalStore(str(files)), list[int](), os.scandir
    for name in ("parts/1-a/x", "parts/2-a/x", "parts/2-a/y", "parts/20/x", "parts/3/x"):
        store.put(name, b"")
    monkeypatch.setattr(os, "scandir", lambda where: opened.append(where) or scandir(where))
    for after, expected, num in (
        ("parts/2", ["parts/2-a/x", "parts/2-a/y", "parts/20/x", "parts/3/x"], 4),
        ("parts/2-a/x", ["parts/2-a/y", "parts/20/x", "parts/3/x"], 4),
        ("parts/2-a/", ["parts/2-a/x", "parts/2-a/y", "parts/20/x", "parts/3/x"], 4),
        ("parts/3/x", [], 2),
    ):
        opened.clear()
        assert [entry.key for entry in store.scan("parts/", after)] == expected
        assert len(opened) == num


def test_foreign_files_are_not_objects(files: Path) -> None:
    store = LocalStore(str(files))
    store.put("a/b", b"1")
    (files / "a" / ".nfs0001").write_bytes(b"")
    (files / "a" / "with blank").write_bytes(b"")
    (files / "lost+found").mkdir(mode=0o000)
    (files / "loop").symlink_to(files)
    (files / "link").symlink_to(files / "a" / "b")
    assert keys(store) == ["a/b"]


def test_a_file_of_a_terabyte_in_the_place_of_a_document(files: Path) -> None:
    """No memory is taken for what the file system, or whoever may write there, says that it has."""
    (files / "steps").mkdir(parents=True)
    with (files / "steps" / "a.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match=r"a\.json: the object has 1,099,511,627,776 bytes, expected a document"):
        LocalStore(str(files)).get("steps/a.json")


class Told:
    """An entry of a directory; who asks for its size and time is noted."""

    def __init__(self, inner: os.DirEntry[str], asked: list[str]) -> None:
        self._inner, self._asked = inner, asked

    def __getattr__(self, name: str) -> object:
        if name == "stat":
            self._asked.append(self._inner.name)
        return getattr(self._inner, name)


def test_a_listing_of_later_keys_asks_nothing_of_earlier_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each save lists the newest steps, of which there may be ten thousand."""
    asked, scandir = list[str](), os.scandir

    @contextmanager
    def told(path: str | int) -> Iterator[Iterator[Told]]:
        with scandir(path) as found:
            yield (Told(entry, asked) for entry in found)

    with LocalStore(str(files)) as store:
        for key in ("steps/1", "steps/2", "steps/3", "steps-2/1", "a/steps/1"):
            store.put(key, b"")
        monkeypatch.setattr(os, "scandir", told)
        assert [entry.key for entry in store.scan("steps/", "steps/2")] == ["steps/3"]
        assert asked == ["3"]
        asked.clear()
        assert [entry.key for entry in store.scan("", "steps-2")] == ["steps-2/1", "steps/1", "steps/2", "steps/3"]
        assert sorted(asked) == ["1", "1", "2", "3"]


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


@pytest.mark.parametrize("below", ["", "run7"], ids=["the root", "a parent"])
def test_a_link_that_leads_nowhere_is_no_empty_root(tmp_path: Path, below: str) -> None:
    """As where the disk that it leads to is not mounted."""
    link, target = tmp_path / "link", tmp_path / "disk" / "ckpt"
    link.symlink_to(target)
    store = LocalStore(str(link / below))
    told = f"{link} is a symbolic link to {target}, which leads nowhere; is its file system mounted"
    for call in (
        lambda: store.put("a", b"1"),
        lambda: store.scan(""),
        lambda: store.get("a"),
        lambda: store.delete("a"),
    ):
        with pytest.raises(StoreError, match=told):
            call()
    target.mkdir(parents=True)
    assert store.scan("") == []
    store.put("a", b"1")
    assert store.get("a") == b"1"


def test_a_directory_that_cannot_be_listed_is_an_error() -> None:
    script = """
import os, sys
from ckptlib.errors import StoreError
from ckptlib.stores import LateHead
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


@pytest.mark.parametrize(("mode", "named"), [(0o333, ""), (0o555, "/root"), (0o666, "/root")])
def test_what_is_denied_above_a_root_is_named(mode: int, named: str) -> None:
    """A directory that cannot be listed cannot be flushed, so a new root in it would not be durable."""
    script = """
import os, sys
from ckptlib.errors import StoreDenied
from ckptlib.stores.local import LocalStore
if os.geteuid() == 0:
    os.setuid(65534)
try:
    LocalStore(sys.argv[1] + "/root").put("a/b", b"1")
except StoreDenied as error:
    assert str(error).endswith(f"a/b: cannot begin to write: Permission denied (errno 13), of {sys.argv[2]}"), error
else:
    sys.exit("was put")
"""
    with tempfile.TemporaryDirectory() as above:  # pytest's own cannot be entered by others
        os.chmod(above, 0o755)
        os.mkdir(f"{above}/dir", 0o700)
        if os.geteuid() == 0:
            os.chown(f"{above}/dir", 65534, 65534)
        os.chmod(f"{above}/dir", mode)
        subprocess.run([sys.executable, "-c", script, f"{above}/dir", f"{above}/dir{named}"], check=True)
        os.chmod(f"{above}/dir", 0o700)


@pytest.mark.parametrize("error", [errno.EPERM, errno.EXDEV], ids=errno.errorcode.__getitem__)
def test_a_file_system_without_links(files: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """Or without such as lead from one directory to another: AFS has none."""

    def refuse(source: str, target: str, **directories: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    store = LocalStore(str(files))
    store.put("a/b", b"1")
    with pytest.raises(ObjectExists):
        store.put("a/b", b"2")
    assert store.get("a/b") == b"1"
    assert temp_files(files) == []


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (errno.EXDEV, "a root must be on one file system"),
        (errno.ENOSYS, "this file system can neither link nor rename a file. If it is a mounted bucket, give the "),
    ],
    ids=["two file systems", "as Mountpoint for Amazon S3"],
)
def test_a_file_system_that_cannot_name_a_file(
    files: Path, monkeypatch: pytest.MonkeyPatch, error: int, advice: str
) -> None:
    def refuse(source: str, target: str, **directories: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    store = LocalStore(str(files))
    with pytest.raises(StoreError, match=f"a/b: cannot publish: .*; {advice}"):
        store.put("a/b", b"1")
    assert (keys(store), temp_files(files)) == ([], [])


@pytest.mark.parametrize("call", ["link", "rename"])
@pytest.mark.parametrize("error", [errno.EEXIST, errno.ENOENT, errno.EIO, errno.ETIMEDOUT], ids=errno.errorcode.get)
def test_an_answer_that_comes_too_late_or_not_at_all(
    files: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    """As over NFS: the name is given, and its directory flushed, though whoever asked for it is told of an error."""
    real, fsync, flushed = getattr(os, call), os.fsync, set[int]()

    def carried_out(*names: str, **directories: int) -> None:
        real(*names, **directories)
        raise OSError(error, os.strerror(error))

    def no_links(*names: str, **directories: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def noting(fd: int) -> None:
        fsync(fd)
        flushed.add(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr(os, call, carried_out)
    monkeypatch.setattr(os, "fsync", noting)
    store = LocalStore(str(files))
    store.put("a/b", b"1")
    assert (files / "a").stat().st_ino in flushed
    with pytest.raises(ObjectExists):
        store.put("a/b", b"2")
    assert store.get("a/b") == b"1"
    assert temp_files(files) == []


def test_an_object_is_as_old_as_its_name(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though its bytes were there long before, as where the machine slept in the flush between the two."""
    link = os.link

    def late(source: str, name: str, *, src_dir_fd: int, dst_dir_fd: int, follow_symlinks: bool) -> None:
        os.utime(source, (0, 0), dir_fd=src_dir_fd)
        link(source, name, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, follow_symlinks=follow_symlinks)

    store = LocalStore(str(files))
    store.put("first", b"a")
    monkeypatch.setattr(os, "link", late)
    store.put("second", b"b")
    first, second = store.scan("")
    assert second.modified >= first.modified


@pytest.mark.parametrize("nbytes", [10, 3 * PAGE_BYTES])
def test_a_file_is_flushed_before_it_has_its_name_and_its_directories_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nbytes: int
) -> None:
    """All of its bytes. Those above a root that the put has made are flushed, too: a power loss takes none of them."""
    root, fsync = tmp_path / "runs" / "new", os.fsync
    flushed: list[tuple[int, int, bool]] = []

    def noted(fd: int) -> None:
        fsync(fd)
        found = os.fstat(fd)
        flushed.append((found.st_ino, found.st_size, (root / "a" / "b").exists()))

    monkeypatch.setattr(os, "fsync", noted)
    LocalStore(str(root)).put("a/b", bytes(PAGE_BYTES), [bytes(nbytes)])
    inode = (root / "a" / "b").stat().st_ino
    assert [(size, named) for ino, size, named in flushed if ino == inode] == [(PAGE_BYTES + nbytes, False)]
    for directory in (tmp_path, tmp_path / "runs"):
        assert directory.stat().st_ino in {ino for ino, _, _ in flushed}
    for directory in (root, root / "a"):
        assert directory.stat().st_ino in {ino for ino, _, named in flushed if named}


@pytest.mark.parametrize("num_flushed", [0, 1, 2])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_an_object_whose_directories_are_not_flushed_stays_until_somebody_can(
    files: Path, monkeypatch: pytest.MonkeyPatch, num_flushed: int, code: int
) -> None:
    """It may have been seen, flushed and told of by others."""
    store, fsync, left = LocalStore(str(files)), os.fsync, [num_flushed]
    store.put("a/b/c", b"1")

    def refuse(fd: int) -> None:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            fsync(fd)
        elif left:
            left[0] -= 1
            if left[0] < 0:
                left.clear()
                raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StoreError, match=rf"a/b/d: cannot flush.*errno {code}.* but a power loss may") as caught:
        store.put("a/b/d", b"2")
    assert isinstance(caught.value, StoreFull) == (code == errno.ENOSPC)
    assert keys(store) == ["a/b/c", "a/b/d"]
    assert temp_files(files) == []
    with pytest.raises(ObjectExists):
        store.put("a/b/d", b"3")
    assert store.get("a/b/d") == b"2"


def test_a_killed_upload_leaves_no_object(files: Path) -> None:
    script = """
import mmap, os, signal, sys
from ckptlib.stores import open_store
def pieces():
    yield mmap.mmap(-1, 1 << 20)
    yield b"tail"
    os.kill(os.getpid(), signal.SIGKILL)
open_store(sys.argv[1]).put("packs/p", bytes(4096), pieces())
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
    store.clean(time.time(), lambda key: False)  # no remains, no root: nothing to do
    store.put("a", b"kept")
    for name, age_s in ((f"1-{'0' * 16}", 1000), (f"2-{'f' * 16}", 0)):
        (files / ".tmp" / name).write_bytes(b"half a pack")
        os.utime(files / ".tmp" / name, (time.time() - age_s,) * 2)
    link = files / ".tmp" / f"3-{'0' * 16}"
    link.symlink_to(files / "a")  # nothing that an upload makes
    os.utime(link, (time.time() - 1000,) * 2, follow_symlinks=False)
    store.clean(time.time() - 500, lambda key: False)
    assert sorted(temp_files(files)) == [f"2-{'f' * 16}", link.name]
    assert store.get("a") == b"kept"


@pytest.fixture(params=["size=1m"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    with mounted(tmp_path / "small", "tmpfs", "-o", request.param) as path:
        yield path


@pytest.mark.root
@pytest.mark.parametrize("first", [0, 1], ids=["direct", "buffered"])
def test_a_full_disk(small_disk: Path, first: int) -> None:
    store = LocalStore(str(small_disk / "root"))
    store.put("a", b"1")
    memory = memoryview(pages(512))[first:]
    with pytest.raises(StoreFull, match=rf"root/p: cannot write {memory.nbytes} bytes: .* bytes are free"):
        store.put("p", bytes(PAGE_NBYTES), [memory])
    assert keys(store) == ["a"]
    assert temp_files(small_disk / "root") == []
    with pytest.raises(StoreFull):
        store.put("b", memory)
    store.put("c", memory[: 256 << 10])
    assert keys(store) == ["a", "c"]


@pytest.mark.root
@pytest.mark.parametrize("small_disk", ["size=1m,nr_inodes=6"], indirect=True)
def test_a_disk_that_is_full_of_files(small_disk: Path) -> None:
    """Where bytes are free, the error does not ask for more of them."""
    store = LocalStore(str(small_disk))
    for key in ("a", "b", "c"):
        store.put(key, b"1")
    with pytest.raises(StoreFull, match=r"small/packs/d: cannot publish .* no inode left for another file; make room"):
        store.put("packs/d", b"1")
    assert keys(store) == ["a", "b", "c"]
    store.delete("a", "b")  # a link counts as a file there
    store.put("packs/d", b"1")
    assert keys(store) == ["c", "packs/d"]


@pytest.mark.root
def test_a_file_system_that_does_not_count_its_bytes(tmp_path: Path) -> None:
    """It is not nearly full: then a sweep would not wait for readers."""
    with mounted(tmp_path / "ramfs", "ramfs") as path:
        store = LocalStore(str(path))
        store.put("a", b"1")
        assert store.free_nbytes() is None
