"""Pieces of memory that are copied together: into a file that is mapped, whatever their sizes, and where they go."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.libc import memory_file
from ckptlib.pages import PAGE_BYTES
from ckptlib.slots.slot import Mapped
from ckptlib.staging import pieces
from ckptlib.staging.pieces import GATHER_BELOW_BYTES, MOST_AT_ONCE, Pieces, Scratch
from ckptlib.staging.windows import SAMPLE_BYTES, Windows

NBYTES = 8 << 20
AT = 4096
"""Where in the file the pieces begin."""


class Target:
    """A file, and its memory here."""

    def __init__(self, fd: int) -> None:
        self.memory = mmap.mmap(fd, NBYTES)
        self.mapped = Mapped(fd, AT, ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + AT)


@pytest.fixture(params=["a file", "no file"])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """Where the kernel takes nothing, memory is copied all the same."""
    if request.param == "no file":
        yield Target(-1)
        return
    fd = memory_file("target")
    os.truncate(fd, NBYTES)
    yield Target(fd)
    os.close(fd)


def sources_of(sizes: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(len(sizes))
    return [rng.integers(1, 256, size, np.uint8) for size in sizes]


def addresses_of(sources: list[np.ndarray]) -> list[int]:
    return [source.ctypes.data for source in sources]


SIZES = {
    "none": [],
    "one": [5],
    "empty ones": [0, 3, 0, 0, 7, 0],
    "small": [random.Random(1).randrange(200) for _ in range(300)],
    "more than go at once": [n % 7 for n in range(2 * MOST_AT_ONCE + 3)],
    "exactly as many": [4] * MOST_AT_ONCE,
    "around the limit": [GATHER_BELOW_BYTES + n for n in (-1, 0, 1, -1, -2, 0)],
    "mixed": [3, 50_000, 1, 2, 100_000, 9],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_one_behind_the_other(target: Target, sizes: list[int]) -> None:
    sources = sources_of(sizes)
    pieces = Pieces(addresses_of(sources), sizes)
    pieces.copy(target.mapped)
    expected = b"".join(map(bytes, sources))
    assert pieces.nbytes == len(expected)
    assert target.memory[AT : AT + len(expected)] == expected
    assert not any(target.memory[:AT])
    assert not any(target.memory[AT + len(expected) : AT + len(expected) + 9000])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 4, 130, 4095, 4096, 9000]), st.sampled_from([0, 0, 0, 1, 64]))))
def test_each_at_its_offset(wanted: list[tuple[int, int]]) -> None:
    fd = memory_file("target")
    os.truncate(fd, NBYTES)
    target, offsets, end = Target(fd), list[int](), 0
    for size, gap in wanted:
        offsets.append(end + gap)
        end += gap + size
    sources = sources_of([size for size, _ in wanted])
    Pieces(addresses_of(sources), [size for size, _ in wanted], offsets).copy(target.mapped)
    os.close(fd)
    expected = bytearray(end)
    for source, offset in zip(sources, offsets, strict=True):
        expected[offset : offset + len(source)] = bytes(source)
    assert target.memory[AT : AT + end] == expected


def test_elsewhere_from_now_on(target: Target) -> None:
    sizes = [4, 6000, 130]
    before, after = sources_of(sizes), [source[::-1].copy() for source in sources_of(sizes)]
    pieces = Pieces(addresses_of(before), sizes)
    pieces.aim(np.array(addresses_of(after), np.uint64))
    pieces.copy(target.mapped)
    assert target.memory[AT : AT + sum(sizes)] == b"".join(map(bytes, after))


@pytest.mark.parametrize("has_files", [True, False])
def test_scratch_grows_and_lets_go(monkeypatch: pytest.MonkeyPatch, has_files: bool) -> None:
    def refuse(name: str) -> int:
        raise OSError("none here")

    if not has_files:
        monkeypatch.setattr(pieces, "memory_file", refuse)
    before, scratch = len(os.listdir("/proc/self/fd")), Scratch()
    for sizes in ([], [3, 4], [100] * 500, [5]):
        sources = sources_of(sizes)
        assert scratch.gather(Pieces(addresses_of(sources), sizes)) == b"".join(map(bytes, sources))
    del scratch
    assert len(os.listdir("/proc/self/fd")) <= before


def test_scratch_does_without_a_file_that_cannot_grow() -> None:
    """And never writes to the descriptor that it has let go of: that may be another file's by then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before, scratch = len(os.listdir("/proc/self/fd")), Scratch()
    resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE_BYTES, hard))
    try:
        for sizes in ([3, 4], [100] * 500, [5]):
            sources = sources_of(sizes)
            assert scratch.gather(Pieces(addresses_of(sources), sizes)) == b"".join(map(bytes, sources))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) <= before
    del scratch
    assert len(os.listdir("/proc/self/fd")) <= before


def test_windows_lie_within_and_everywhere() -> None:
    sizes = [SAMPLE_BYTES, SAMPLE_BYTES + 1, SAMPLE_BYTES + 40, 5000]
    tensors = [np.arange(size, dtype=np.uint32).astype(np.uint8) for size in sizes]
    windows, rng, scratch = Windows(addresses_of(tensors), sizes), np.random.default_rng(7), Scratch()
    seen: list[set[int]] = [set() for _ in sizes]
    for _ in range(1000):
        sample = windows.look(rng, scratch)
        for i, (tensor, offset) in enumerate(zip(tensors, sample.offsets, strict=True)):
            assert sample.window(i) == tensor[offset : offset + SAMPLE_BYTES].tobytes()
            assert len(sample.window(i)) == SAMPLE_BYTES
            seen[i].add(offset)
    assert [seen[0], seen[1], seen[2]] == [{0}, {0, 1}, set(range(41))]  # the last byte, too
    assert min(seen[3]) < 100
    assert max(seen[3]) > 5000 - SAMPLE_BYTES - 100
