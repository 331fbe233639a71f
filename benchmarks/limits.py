"""What can this machine do at best? The bare speeds that everything else is a share of.

Writing: one thread, 16 MiB blocks of random bytes, aligned, past the page cache, fsync included. Reading: the same
file, the same way, and by eight threads with 4 MiB each. Copying and digesting: warm memory, one thread.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash

from benchmarks.figures import Figures, Options, run

BLOCK_BYTES = 16 << 20
SMALL_BLOCK_BYTES = 4 << 20
PAGE_BYTES = 4096


def aligned(nbytes: int) -> np.ndarray:
    """Touched, page-aligned memory with random bytes."""
    memory = np.frombuffer(mmap.mmap(-1, nbytes), dtype=np.uint8)
    memory[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    return memory


def direct_write(path: Path, nbytes: int, source: np.ndarray) -> float:
    """Seconds to write a new file and flush it."""
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    try:
        for at in range(0, nbytes, source.nbytes):
            done = os.pwrite(fd, source.data[: min(source.nbytes, nbytes - at)], at)
            assert done == min(source.nbytes, nbytes - at), "a short write"
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def direct_read(path: Path, target: np.ndarray) -> float:
    """Seconds to read a whole file, block by block, into the same memory."""
    nbytes = path.stat().st_size
    began = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for at in range(0, nbytes, target.nbytes):
            os.preadv(fd, [target.data], at)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def direct_reads(path: Path, threads: int = 8) -> float:
    """As `direct_read`, with so many reads under way, each into memory of its own."""
    blocks = queue.SimpleQueue[np.ndarray]()
    for _ in range(threads):
        blocks.put(aligned(SMALL_BLOCK_BYTES))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(at: int) -> None:
        block = blocks.get()
        os.preadv(fd, [block.data], at)
        blocks.put(block)

    try:
        with ThreadPoolExecutor(threads) as executor:
            began = time.perf_counter()
            list(executor.map(read, range(0, path.stat().st_size, SMALL_BLOCK_BYTES)))
            return time.perf_counter() - began
    finally:
        os.close(fd)


class DiskSeconds(NamedTuple):
    write: float
    read: float
    reads: float
    """With eight under way."""


def disk_seconds(directory: Path, nbytes: int) -> DiskSeconds:
    """Of `nbytes`, rounded up to whole pages, in a file that is gone afterwards."""
    nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    block, path = aligned(min(BLOCK_BYTES, nbytes)), directory / "bare"
    directory.mkdir(parents=True, exist_ok=True)
    try:
        return DiskSeconds(direct_write(path, nbytes, block), direct_read(path, block), direct_reads(path))
    finally:
        path.unlink(missing_ok=True)


def copy_seconds(nbytes: int) -> float:
    """Seconds of a warm copy."""
    source, target = aligned(nbytes), aligned(nbytes)
    began = time.perf_counter()
    ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)
    return time.perf_counter() - began


def digest_seconds(nbytes: int) -> float:
    """Seconds of one xxh3-128 over warm memory."""
    source = aligned(nbytes)
    began = time.perf_counter()
    xxhash.xxh3_128_hexdigest(source.data)
    return time.perf_counter() - began


def evict(directory: Path) -> float:
    """Drops all files below from the page cache; returns the fraction of their pages that are still there."""
    resident = total = 0
    for path in directory.rglob("*"):
        if not path.is_file():
            continue
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # a writer that finishes beside this gave it its name
            continue
        try:
            if nbytes := os.fstat(fd).st_size:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                here, pages = _resident(fd, nbytes)
                resident, total = resident + here, total + pages
        finally:
            os.close(fd)
    return resident / max(total, 1)


def _resident(fd: int, nbytes: int) -> tuple[int, int]:
    pages = -(-nbytes // PAGE_BYTES)
    flags = (ctypes.c_ubyte * pages)()
    mapped = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
    address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    if ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), flags):
        raise OSError(ctypes.get_errno(), "mincore")
    return int((np.frombuffer(flags, dtype=np.uint8) & 1).sum()), pages


def measure(options: Options, directory: Path, figures: Figures) -> None:
    nbytes = int((0.016 if options.toy else options.gb) * 1e9)
    for _ in range(1 if options.toy else options.rounds):
        disk = disk_seconds(directory, nbytes)
        for what, seconds in (
            ("direct write", disk.write),
            ("direct read", disk.read),
            ("direct reads, 8 under way", disk.reads),
            ("copy", copy_seconds(nbytes)),
            ("digest", digest_seconds(nbytes)),
        ):
            figures.add("bare", what, "rate", "GB/s", [nbytes / seconds / 1e9], nbytes=nbytes)


def main(arguments: list[str]) -> None:
    run(arguments, "limits", measure, gb=1.0)
