"""How fast is an export, and how much memory does it take, beside a bare read and a bare copy by the same disk?

One checkpoint of one rank, in float32. All subjects take turns, each in a process of its own: an export to each format,
from a cold and from a warm page cache; a bare read of the packs with direct I/O, which is the disk's speed; and a bare
copy of them, read and written at once in pieces of 16 MiB, flushed at the end, with direct I/O and through the page
cache. Source and target are on one disk, so no export can be faster than the bare copy. Ratios are of one turn.
"""

from __future__ import annotations

import importlib
import io
import mmap
import os
import resource
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

from benchmarks.common import Line, tell, told
from benchmarks.figures import Figures, Options, rotated, run

SUBJECT = "ckptlib"
FORMATS = ("safetensors", "hf", "torch", "dcp")
READ, COPY, CACHED = "bare direct read", "bare direct copy", "bare copy through the page cache"
PIECE_BYTES = 16 * 1024 * 1024
PAGE_BYTES = 4096


def main(arguments: list[str]) -> None:
    run(arguments, "exports", measure, gb=4.0, rounds=3)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    gb = 0.01 if options.toy else options.gb
    given = {"gb": gb, "directory": str(directory)}
    figures.attempt("-", SUBJECT, __name__, 1, {**given, "what": "make"}, options.timeout_s)
    turns = [
        *((subject, "cold", subject) for subject in (READ, COPY, CACHED)),
        *((SUBJECT, f"{name}, {cache}", name) for name in FORMATS for cache in ("cold", "warm")),
    ]
    for turn in range(1 if options.toy else options.rounds):
        seconds: dict[str, float] = {}
        for subject, case, what in rotated(turns, turn):
            asked = {**given, "what": what, "cold": case.endswith("cold")}
            for line in figures.attempt(case, subject, __name__, 1, asked, options.timeout_s):
                seconds[case if subject == SUBJECT else subject] = line["seconds"]
                _add(figures, case, subject, line)
        for _, case, _ in turns:
            for bare in {READ, COPY} & seconds.keys() if case in seconds else ():
                figures.add(case, SUBJECT, f"speed over {bare}", "ratio", [seconds[bare] / seconds[case]])


def _add(figures: Figures, case: str, subject: str, line: Line) -> None:
    figures.add(case, subject, "speed", "GB/s", [line["gb"] / line["seconds"]])
    figures.add(case, subject, "processor", "s/GB", [line["cpu_s"] / line["gb"]])
    if subject == SUBJECT:
        figures.add(case, subject, "memory beyond the imports", "MB", [line["memory_mb"]])


def work() -> None:
    given = told()
    root, out = Path(given["directory"]) / "root", Path(given["directory"]) / "out"
    if given["what"] == "make":
        _make(root, given["gb"])
        return
    packs = sorted(root.glob("packs/*/*.safetensors"))
    for pack in packs:
        set_cache(pack, given["cold"])
    if given["what"] in FORMATS:
        _export(root, out, given["what"])
        return
    began, cpu = time.perf_counter(), time.process_time()
    if given["what"] == READ:
        _read(packs)
    else:
        _copy(packs, out, direct=given["what"] == COPY)
    seconds, nbytes = time.perf_counter() - began, sum(pack.stat().st_size for pack in packs)
    out.unlink(missing_ok=True)
    tell(seconds=seconds, cpu_s=time.process_time() - cpu, gb=nbytes / 1e9)


def _make(root: Path, gb: float) -> None:
    import torch

    import ckptlib

    rows = int(gb * 1e9) // (100 * 4 * 1024)
    model = {f"layers.{i}.weight": torch.randn(rows, 1024) for i in range(100)}
    ckptlib.save(root, {"model": model}, step=1)


def _export(root: Path, out: Path, name: str) -> None:
    """Imports are not counted, nor is their memory."""
    needs = ("torch.distributed.checkpoint", "ckptlib.exporting.dcp_files") if name in ("torch", "dcp") else ()
    for module in ("ckptlib.exporting.export", *needs):
        importlib.import_module(module)
    if needs:
        sys.modules["torch"].save([0], io.BytesIO())  # imports more
    before = resource.getrusage(resource.RUSAGE_SELF)
    watch = PeakMemory()
    began = time.perf_counter()
    report = sys.modules["ckptlib"].export(root, out, format=name)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    tell(seconds=seconds, cpu_s=cpu_s, gb=report.nbytes / 1e9, memory_mb=watch.stop() / 1e6)
    shutil.rmtree(out) if out.is_dir() else out.unlink()


class PeakMemory:
    """Private memory of this process, beyond what it had: pages of files, which the kernel takes back, do not count."""

    def __init__(self) -> None:
        self._before, self._most, self._stopped = _anonymous(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.02):
            self._most = max(self._most, _anonymous())

    def stop(self) -> int:
        """Bytes."""
        self._stopped.set()
        self._thread.join()
        return max(0, self._most - self._before)


def _anonymous() -> int:
    """Of anonymous and shared anonymous memory: everything that is not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))


def set_cache(path: Path, cold: bool) -> None:
    """A file is in the page cache, or not."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    if cold:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    else:
        while os.read(fd, PIECE_BYTES):
            pass
    os.close(fd)


def _read(packs: Sequence[Path]) -> None:
    buffer = mmap.mmap(-1, PIECE_BYTES)
    for pack in packs:
        fd, at, size = os.open(pack, os.O_RDONLY | os.O_DIRECT), 0, pack.stat().st_size
        while at < size:
            at += os.preadv(fd, [buffer], at)
        os.close(fd)


def _copy(packs: Sequence[Path], out: Path, direct: bool) -> None:
    """One thread reads, one writes."""
    flag = os.O_DIRECT if direct else 0
    target = os.open(out, os.O_RDWR | os.O_CREAT | os.O_EXCL | flag)
    os.posix_fallocate(target, 0, sum(pack.stat().st_size for pack in packs))
    free: SimpleQueue[mmap.mmap] = SimpleQueue()
    filled: SimpleQueue[tuple[mmap.mmap, int] | None] = SimpleQueue()
    for _ in range(3):
        free.put(mmap.mmap(-1, PIECE_BYTES))

    def read() -> None:
        for pack in packs:
            fd, at, size = os.open(pack, os.O_RDONLY | flag), 0, pack.stat().st_size
            while at < size:
                buffer = free.get()
                count = os.preadv(fd, [buffer], at)
                filled.put((buffer, count))
                at += count
            os.close(fd)
        filled.put(None)

    reader, end = threading.Thread(target=read), 0
    reader.start()
    while (found := filled.get()) is not None:
        buffer, count = found
        with memoryview(buffer) as view:  # whole pages; the end of a file is cut to its length when all is done
            os.pwrite(target, view[: -(-count // PAGE_BYTES) * PAGE_BYTES if direct else count], end)
        end += count
        free.put(buffer)
    reader.join()
    os.ftruncate(target, end)
    os.fdatasync(target)
    os.close(target)


if __name__ == "__main__":
    work()
