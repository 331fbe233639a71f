"""A file that is written piece by piece, around the page cache, is what the pieces are; errors are told."""

from __future__ import annotations

import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptlib.exporting import direct_file
from ckptlib.exporting.direct_file import DirectFile
from ckptlib.pages import PAGE_BYTES

BUFFER_BYTES = 4 * PAGE_BYTES


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "BUFFER_BYTES", BUFFER_BYTES)


@pytest.fixture(params=["disk", "memory"])
def fd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file" if request.param == "disk" else Path(f"/dev/shm/ckptlib-test-{os.getpid()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    yield fd
    os.close(fd)
    path.unlink()


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [PAGE_BYTES],
        [BUFFER_BYTES],
        [BUFFER_BYTES + 1, 1, PAGE_BYTES - 1],
        [7] * 3000,
        [BUFFER_BYTES * 20 + 5, 3, BUFFER_BYTES - 8],
    ],
)
def test_is_what_was_given(fd: int, sizes: list[int]) -> None:
    pieces = [os.urandom(size) for size in sizes]
    with DirectFile(fd) as file:
        for piece in pieces:
            given = bytearray(piece)
            assert file.write(given) == len(piece)
            given[:] = bytes(len(given))  # it may be used again at once
        file.finish()
        assert file.nbytes == sum(sizes)
    assert os.pread(fd, 1 << 22, 0) == b"".join(pieces)


def test_pages_are_written_from_where_they_are(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they begin on a page here and in the file; before, between and behind what does not."""
    monkeypatch.setattr(direct_file, "FROM_BYTES", PAGE_BYTES)
    expected = b""
    with DirectFile(fd) as file:
        for size, skipped in (
            *((PAGE_BYTES, 0), (10, 0), (PAGE_BYTES, 0), (PAGE_BYTES - 10, 0), (3 * BUFFER_BYTES + 5, 0)),
            *((PAGE_BYTES - 5, 0), (2 * PAGE_BYTES, 64), (2 * PAGE_BYTES, 0), (7, 0)),
        ):
            memory = mmap.mmap(-1, size + skipped)
            memory[skipped:] = piece = os.urandom(size)
            with memoryview(memory) as view:
                file.write(view[skipped:])
            memory[:] = bytes(len(memory))
            expected += piece
        file.finish()
        assert file.nbytes == len(expected)
    assert os.pread(fd, 1 << 22, 0) == expected


@pytest.mark.parametrize("kept", [False, True])
def test_an_error_is_told_at_the_latest_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """Also where whoever wrote has been told of it at once, as of what is written from where it is, and kept that for
    himself, as torch's writer does."""
    monkeypatch.setattr(direct_file, "FROM_BYTES", PAGE_BYTES)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BUFFER_BYTES + 100, limits[1]))
    try:
        with DirectFile(fd) as file:
            if kept:
                with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                    file.write(mmap.mmap(-1, 2 * BUFFER_BYTES))
            else:
                with memoryview(mmap.mmap(-1, 3 * BUFFER_BYTES)) as view:
                    file.write(view[1 : 1 + 2 * BUFFER_BYTES])  # begins on no page, so it is copied
            with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                file.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        os.close(fd)
