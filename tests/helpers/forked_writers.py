"""Writer processes of this process, forked from a server that has imported what a writer imports, numpy too: 0.25 s of
a core less for each, half of which are the imports before its first order.

They are processes as `ckptlib.writer.launch` starts them: children of this process, with its descriptors, a session of
their own, no torch, and `ckptlib.writer.__main__` as their program. Where more than the environment differs from what
it was when the server started, and in children of this process, they are executed as ever; so are those of ranks, and
of programs that tests start.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

import pytest
from places import ROOT, TESTS

from ckptlib.writer import launch

PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
MESSAGE_BYTES = 1 << 18
"""The most of one: a writer's arguments and its environment."""
_PR_SET_CHILD_SUBREAPER = 36
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@contextmanager
def forked_writers() -> Iterator[None]:
    """Writers of this process are forked in there. The server takes 0.3 s of a core itself: for whoever starts many."""
    server = WriterServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "subprocess", server)
        yield
    server.close()


class Child:
    """Of this process, and how it ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        with self._lock:
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)


class ForkedWriter:
    """As much of `subprocess.Popen` as a writer's trainer asks for. Its pipe is closed when it is let go of."""

    def __init__(self, child: Child, stdin: BinaryIO | None) -> None:
        self.pid, self.kill = child.pid, child.kill
        self.stdin = stdin
        self._child = child

    def wait(self, timeout: float) -> int:
        if self._child.poll() is None:
            fd, ends = os.pidfd_open(self.pid), select.poll()
            ends.register(fd, select.POLLIN)
            ends.poll(timeout * 1000)
            os.close(fd)
        if (code := self._child.poll()) is None:
            raise subprocess.TimeoutExpired("ckptlib.writer", timeout)
        return code


class WriterServer:
    """Takes the place of the module `subprocess` in `ckptlib.writer.launch`."""

    PIPE, DEVNULL = PIPE, DEVNULL

    def __init__(self) -> None:
        self._like = _surroundings()
        self._lock = threading.Lock()
        self._children: list[Child] = []
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join([str(ROOT), str(TESTS), *filter(None, sys.path)])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(TESTS / "workers" / "writer_forks.py"), str(theirs.fileno()), str(MESSAGE_BYTES)],
                pass_fds=[theirs.fileno()],
                stdin=DEVNULL,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
            )

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def Popen(
        self,
        args: Sequence[str],
        *,
        pass_fds: Sequence[int],
        stdin: int,
        stdout: BinaryIO,
        env: Mapping[str, str],
        **options: Any,
    ) -> ForkedWriter | subprocess.Popen[bytes]:
        if _surroundings() != self._like:
            return subprocess.Popen(args, pass_fds=pass_fds, stdin=stdin, stdout=stdout, env=env, **options)
        assert args[:3] == [sys.executable, "-m", "ckptlib.writer"]
        assert options == {"bufsize": 0, "stderr": stdout, "start_new_session": True}
        theirs, ours = os.pipe() if stdin == PIPE else (os.open(os.devnull, os.O_RDWR), None)
        targets = [0, 1, 2, *pass_fds]
        order = json.dumps({"args": args[3:], "env": dict(env), "targets": targets}).encode()
        assert len(order) < MESSAGE_BYTES
        try:
            with self._lock:
                child = Child(self._fork(order, [theirs, stdout.fileno(), stdout.fileno(), *pass_fds]))
                # Which reaps those that were let go of.
                self._children = [child, *(other for other in self._children if other.poll() is None)]
        finally:
            os.close(theirs)
        return ForkedWriter(child, None if ours is None else os.fdopen(ours, "wb", 0))

    def _fork(self, order: bytes, fds: Sequence[int]) -> int:
        """What the server forks becomes this process's child as its parent there ends."""
        adopts = ctypes.CDLL(None).prctl
        adopts(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self._socket, [order], fds)
            pid = int(self._socket.recv(MESSAGE_BYTES) or b"0")
            assert pid, "the server of writers is gone"
            assert self._socket.recv(MESSAGE_BYTES) == b"adopted"
            return pid
        finally:
            adopts(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _surroundings() -> tuple[object, ...]:
    """What a writer has from the process that starts it, but for the environment that programs read while they run."""
    with suppress(FileNotFoundError):
        return (
            os.getpid(),
            os.getcwd(),
            sys.path[:],
            {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "LD_"))},
            [resource.getrlimit(limit) for limit in _LIMITS],
            os.getresuid(),
            os.getresgid(),
            os.sched_getaffinity(0),
            os.nice(0),
            signal.pthread_sigmask(signal.SIG_BLOCK, []),
        )
    return ()
