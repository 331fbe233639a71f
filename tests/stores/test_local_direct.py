"""Reads around the page cache give what plain ones do, wherever they begin and end; they are made where they help."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from ckptlib.pages import PAGE_BYTES
from ckptlib.stores import local_direct
from ckptlib.stores.local import LocalStore
from ckptlib.stores.local_direct import FROM_BYTES, past_cache, read_past_cache

NBYTES = 3 * FROM_BYTES + 1234


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(NBYTES))
    return path


def drop(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("skipped", [0, 16, 64])
@pytest.mark.parametrize("offset", [0, 1, PAGE_BYTES, PAGE_BYTES + 64, NBYTES - FROM_BYTES - 3])
def test_gives_what_a_plain_read_gives(path: Path, monkeypatch: pytest.MonkeyPatch, offset: int, skipped: int) -> None:
    monkeypatch.setattr(local_direct, "SLICE_BYTES", 2 * PAGE_BYTES)
    monkeypatch.delattr(local_direct._local, "buffer", raising=False)
    monkeypatch.setattr(local_direct, "_is_cached", lambda *_: False)  # the kernel need not drop what it is asked to
    expected = path.read_bytes()
    fd = os.open(path, os.O_RDONLY)
    for nbytes in (FROM_BYTES, FROM_BYTES + 1, NBYTES - offset):
        if offset + nbytes > NBYTES:
            continue
        room = mmap.mmap(-1, nbytes + skipped)
        view = memoryview(room)[skipped:]
        with past_cache(fd) as possible:
            pass
        done = read_past_cache(fd, view, offset)
        assert view[:done] == expected[offset : offset + done]
        if possible:
            assert done >= nbytes - PAGE_BYTES
        assert os.pread(fd, 1, 1) == expected[1:2]  # the descriptor is as it was
    os.close(fd)
    monkeypatch.delattr(local_direct._local, "buffer", raising=False)


def test_leaves_small_and_cached_ranges_to_the_page_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    view = memoryview(mmap.mmap(-1, FROM_BYTES))
    os.pread(fd, NBYTES, 0)
    assert read_past_cache(fd, view, 0) == 0
    drop(path)
    assert read_past_cache(fd, view[: FROM_BYTES - 1], 0) == 0
    os.close(fd)


@pytest.mark.parametrize("cached", [0, FROM_BYTES - PAGE_BYTES], ids=["first", "last"])
def test_a_page_that_was_read_ahead_does_not_make_a_range_cached(
    path: Path, monkeypatch: pytest.MonkeyPatch, cached: int
) -> None:
    """It did: each read through the page cache read the next one's first page ahead, up to the end of the file.

    Which pages are there is told here: the kernel reads others ahead when it likes, even for a question about one.
    """
    monkeypatch.setattr(local_direct, "_has_page", lambda fd, view, offset: offset == cached)
    fd = os.open(path, os.O_RDONLY)
    with past_cache(fd) as possible:
        pass
    if not possible:
        pytest.skip("this file system has no direct I/O")
    view = memoryview(mmap.mmap(-1, FROM_BYTES))
    assert read_past_cache(fd, view, 0) == FROM_BYTES
    assert view == path.read_bytes()[:FROM_BYTES]
    os.close(fd)


def test_a_file_system_that_refuses_it() -> None:
    """tmpfs has taken it since Linux 6.6, and did not before."""
    path = Path(f"/dev/shm/ckptlib-test-{os.getpid()}")
    path.write_bytes(bytes(FROM_BYTES))
    try:
        store = LocalStore("/dev/shm")
        store.reads_once = True
        view = memoryview(mmap.mmap(-1, FROM_BYTES))
        view[:1] = b"x"
        store.get_into(path.name, 0, view)
        assert view == bytes(FROM_BYTES)
    finally:
        path.unlink()
