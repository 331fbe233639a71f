"""Kills processes right before the n-th call by which they change files: crash points that do not depend on timing.

    python benchmarks/conformance/tracer.py --pid 4711 --prefix /scratch/run --kill-at 12

A process of its own, by ptrace, without any part of the libraries that are traced. It prints a line when it watches,
and a second one, JSON, at the end: how many calls there were, which one it killed before, and whether it did. Calls
count when they create, write, flush, rename or remove files below the prefix. The children of a traced process are
traced, too. Linux on x86-64 and arm64, 5.3 or later.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import signal
from contextlib import suppress
from pathlib import Path

_X86 = """
    write 1 pwrite64 18 writev 20 pwritev 296 pwritev2 328 sendfile 40 copy_file_range 326 fsync 74 fdatasync 75
    ftruncate 77 fallocate 285 open 2 creat 85 openat 257 truncate 76 rename 82 renameat 264 renameat2 316 mkdir 83
    mkdirat 258 rmdir 84 unlink 87 unlinkat 263 link 86 linkat 265 symlink 88 symlinkat 266
"""
_ARM = """
    write 64 pwrite64 68 writev 66 pwritev 70 pwritev2 287 sendfile 71 copy_file_range 285 fsync 82 fdatasync 83
    ftruncate 46 fallocate 47 openat 56 truncate 45 renameat 38 renameat2 276 mkdirat 34 unlinkat 35 linkat 37
    symlinkat 36
"""
_words = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), "").split()
CALLS = dict(zip(map(int, _words[1::2]), _words[::2], strict=True))
"""Names of the calls that change files, by number."""

_PATH_ARGUMENT = {
    **dict.fromkeys(("open", "creat", "truncate", "rename", "mkdir", "rmdir", "unlink"), 0),
    **dict.fromkeys(("openat", "renameat", "renameat2", "mkdirat", "unlinkat", "link", "symlink"), 1),
    "linkat": 3,
    "symlinkat": 2,
}
"""Which argument names a file; of the others, a descriptor does, the first argument."""
_FLAGS_ARGUMENT = {"open": 1, "openat": 2}

_SEIZE, _INTERRUPT, _SYSCALL, _LISTEN, _SYSCALL_INFO = 0x4206, 0x4207, 24, 0x4208, 0x420E
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10
"""Marked stops at calls; children by fork, vfork and clone, and after exec."""
_EVENT_STOP = 128
_WALL = 0x40000000
_ENTRY = 1
_PTRACER = 0x59616D61
_FOR_ALL = ctypes.c_ulong(-1)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class _Call(ctypes.Structure):
    """What the kernel says of a call that begins."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("padding", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction", ctypes.c_uint64),
        ("stack", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
    )


def allow() -> None:
    """In a process that is to be traced: allows it where only parents may."""
    _libc.prctl(_PTRACER, _FOR_ALL, 0, 0, 0)


def family(pid: int) -> list[int]:
    """A process and all that descend from it, as far as their parents live."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


class Tracer:
    """Follows a family of processes from call to call. All of it must happen in one thread."""

    def __init__(self, pid: int, prefix: str, kill_at: int | None, spare_helpers: bool) -> None:
        self._root = pid
        self._prefix = prefix
        self._kill_at = kill_at
        self._spare_helpers = spare_helpers
        self._traced: set[int] = set()
        self._num_calls = 0
        self._killed_before: str | None = None
        self._attach()

    def run(self) -> dict[str, object]:
        """Until it has killed, or the first process has ended."""
        while self._root in self._traced and self._killed_before is None:
            thread, status = os.waitpid(-1, _WALL)
            self._traced.add(thread)
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                self._traced.discard(thread)
            elif os.WIFSTOPPED(status):
                self._stopped(thread, os.WSTOPSIG(status), status >> 16)
        if self._killed_before is None or not self._spare_helpers:
            self._kill(self._traced)
        return {"calls": self._num_calls, "before": self._killed_before}

    def _attach(self) -> None:
        """To every thread of every process; again, until there is no new one."""
        while True:
            threads = {int(p.name) for pid in family(self._root) for p in Path(f"/proc/{pid}/task").glob("[0-9]*")}
            if threads <= self._traced:
                return
            for thread in threads - self._traced:
                self._traced.add(thread)
                if self._ask(_SEIZE, thread, 0, _OPTIONS):
                    self._ask(_INTERRUPT, thread)

    def _stopped(self, thread: int, number: int, event: int) -> None:
        if number == signal.SIGTRAP | 0x80:
            self._at_call(thread)
        elif event == _EVENT_STOP and number in (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            self._ask(_LISTEN, thread)
            return
        deliver = 0 if event or number == signal.SIGTRAP | 0x80 else number
        if self._killed_before is None:
            self._ask(_SYSCALL, thread, 0, deliver)

    def _at_call(self, thread: int) -> None:
        call = _Call()
        size = ctypes.sizeof(call)
        if _libc.ptrace(_SYSCALL_INFO, thread, size, ctypes.addressof(call)) < 0 or call.op != _ENTRY:
            return
        name = CALLS.get(call.number)
        path = None if name is None else self._path(thread, name, list(call.arguments))
        if name is None or path is None or not path.startswith(self._prefix):
            return
        self._num_calls += 1
        if self._num_calls == self._kill_at:
            self._killed_before = f"{name} {path.removeprefix(self._prefix)}"
            self._kill({self._root})

    def _kill(self, threads: set[int]) -> None:
        for thread in threads:
            with suppress(ProcessLookupError):
                os.kill(thread, signal.SIGKILL)

    def _path(self, thread: int, name: str, arguments: list[int]) -> str | None:
        """Of the file that a call would change; None when it changes none."""
        if name in _FLAGS_ARGUMENT and not arguments[_FLAGS_ARGUMENT[name]] & (os.O_CREAT | os.O_TRUNC):
            return None
        try:
            if name not in _PATH_ARGUMENT:
                return os.readlink(f"/proc/{thread}/fd/{arguments[0]}")
            at = _PATH_ARGUMENT[name]
            path = self._text(thread, arguments[at])
            if path.startswith("/"):
                return path
            folder = ctypes.c_int(arguments[at - 1] & 0xFFFFFFFF).value if at else -100
            return os.path.join(os.readlink(f"/proc/{thread}/{'cwd' if folder == -100 else f'fd/{folder}'}"), path)
        except OSError:
            return None

    @staticmethod
    def _text(thread: int, address: int) -> str:
        with Path(f"/proc/{thread}/mem").open("rb", buffering=0) as memory:
            memory.seek(address)
            return os.fsdecode(memory.read(4096).partition(b"\0")[0])

    @staticmethod
    def _ask(request: int, thread: int, address: int = 0, data: int = 0) -> bool:
        """False where the thread has just ended."""
        return bool(_libc.ptrace(request, thread, address, data) >= 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--prefix", required=True)
    parser.add_argument("--kill-at", type=int)
    parser.add_argument("--spare-helpers", action="store_true", help="kills the first process only")
    given = parser.parse_args()
    tracer = Tracer(given.pid, given.prefix, given.kill_at, given.spare_helpers)
    print("watching", flush=True)
    print(json.dumps(tracer.run()), flush=True)


if __name__ == "__main__":
    main()
