"""Writers that are forked from a server, which has imported what they need: a start as production makes it takes 0.3 s
of a core, and the save of a test 0.02 s.

`ckptlib.writer.launch` stays as it is, and so does all that it hands over: arguments, variables, descriptors. Only the
interpreter is not started anew. A writer is its trainer's child, as it insists on: the process that forks it ends at
once, and the trainer takes it in. Its command line is the server's; `/proc` has "writer" and its trainer's pid as its
name.

    python -m helpers.forked_writers FD     the server: orders come over this descriptor
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import resource
import runpy
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from helpers.limits import VARIABLE
from places import ROOT, TESTS

START_TIMEOUT_S = 150.0
_ORDER_NBYTES = 1 << 17
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans among the descendants of this process become its children
_LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]


@contextmanager
def forked_writers() -> Iterator[None]:
    """Within, the writers of this process are forked."""
    from ckptlib.writer import launch

    _server(os.getpid())  # now, before a test counts its children
    launch.subprocess = _FORKING  # type: ignore[assignment]
    try:
        yield
    finally:
        launch.subprocess = subprocess


def fork_writers_from_here() -> None:
    """From now on, the writers of this process are forked from what it has imported; it has one thread yet."""
    from ckptlib.writer import launch

    _servers[os.getpid()] = _Server(_fork_server)
    launch.subprocess = _FORKING  # type: ignore[assignment]


def process_name(trainer: int) -> str:
    """Of its forked writers."""
    return f"writer {trainer}"


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A forked writer, as `launch` starts it and `Child` holds it."""

    def _execute_child(self, args: Sequence[str], *more: Any) -> None:
        pass_fds, env = more[3], more[5]
        server = _server(os.getpid())
        if VARIABLE in env or server.world != _world():  # the variable is read as an interpreter starts
            super()._execute_child(args, *more)  # type: ignore[misc]
            return
        pipes = p2cread, _, _, c2pwrite, _, errwrite = more[9:15]
        fds = {0: p2cread, 1: c2pwrite, 2: errwrite, **{fd: fd for fd in pass_fds}}
        self.pid = server.fork(args, env, fds)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


_FORKING = SimpleNamespace(**{**vars(subprocess), "Popen": _Forked})


class _Server:
    """The server of one process, whose child it is."""

    def __init__(self, start: Callable[[socket.socket], object]) -> None:
        """`start`: a server with this end. It ends when this process does."""
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._end.settimeout(START_TIMEOUT_S)
        self._lock = threading.Lock()
        self._num_orders = 0
        self.world = _world()
        with theirs:
            self._process = start(theirs)

    def fork(self, args: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int]) -> int:
        """Returns the pid of the new child. `fds`: this process's descriptor for each that the child gets."""
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        with self._lock:
            self._num_orders += 1
            order = {"number": self._num_orders, "args": args, "env": dict(env), "fds": [*fds]}
            place = {"trainer": os.getpid(), "cwd": os.getcwd()}
            assert prctl(_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
            try:
                socket.send_fds(self._end, [json.dumps(order | place).encode()], [*fds.values()])
                number = 0
                while number < self._num_orders:  # Ctrl-C may have come before the answer to an earlier one
                    number, pid = map(int, self._end.recv(100).split())
                return pid
            finally:
                prctl(_SUBREAPER, 0, 0, 0, 0)


def _world() -> tuple[str, int]:
    """What a server cannot hand on: the file systems that this process sees, and its user."""
    return os.readlink("/proc/self/ns/mnt"), os.geteuid()


_servers: dict[int, _Server] = {}


def _server(pid: int) -> _Server:
    """Of the process that asks: one that was forked has a server of its own."""
    if pid not in _servers:
        _servers[pid] = _Server(_start_server)
    return _servers[pid]


def _start_server(end: socket.socket) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(map(str, (TESTS, ROOT)))
    return subprocess.Popen(
        [sys.executable, "-m", "helpers.forked_writers", str(end.fileno())],
        pass_fds=[end.fileno()],
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )


def _fork_server(end: socket.socket) -> None:
    if os.fork():
        return
    try:
        os.setsid()
        os.closerange(3, end.fileno())
        os.closerange(end.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        serve(end)
    finally:
        os._exit(0)


def serve(end: socket.socket) -> None:
    """Until the trainer is gone."""
    import numpy  # noqa: F401

    import ckptlib.writer.process  # noqa: F401

    gc.freeze()  # no writer need look through all of it
    while True:
        data, fds, _, _ = socket.recv_fds(end, _ORDER_NBYTES, 100)
        if not data:
            return
        heard, told = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            if not os.fork():
                os.close(heard)
                _be_writer(json.loads(data), fds, told, between)
            os._exit(0)
        for fd in (told, *fds):  # before the answer: the locks are the writer's alone
            os.close(fd)
        os.waitpid(between, 0)
        with suppress(BrokenPipeError):  # the trainer is gone
            end.send(os.read(heard, 100))
        os.close(heard)


def _be_writer(order: dict[str, Any], fds: list[int], told: int, between: int) -> NoReturn:
    """`told`: where it says that it has what it was given. `between`: what forked this process, and ends at once."""
    status = 1
    try:
        os.setsid()
        Path("/proc/self/comm").write_text(process_name(order["trainer"]))
        floor = max(order["fds"]) + 1
        told, *lifted = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, floor) for fd in (told, *fds)]
        for number, fd in zip(order["fds"], lifted, strict=True):
            os.dup2(fd, number)
        for fd in {*map(int, os.listdir("/proc/self/fd"))} - {*order["fds"], told}:
            with suppress(OSError):  # that of the listing is closed
                os.close(fd)
        trainer = order["trainer"]
        while os.getppid() == between:
            time.sleep(0.0002)
        os.chdir(order["cwd"])
        os.sched_setaffinity(0, os.sched_getaffinity(trainer))
        for limit in _LIMITS:
            resource.setrlimit(limit, resource.prlimit(trainer, limit))
        os.environ.clear()
        os.environ.update(order["env"])
        sys.path[:0] = order["env"]["PYTHONPATH"].split(os.pathsep)
        os.write(told, f"{order['number']} {os.getpid()}".encode())
        os.close(told)
        _run(order["args"])
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(args: Sequence[str]) -> None:
    """As `python -m ckptlib.writer`, up to where the interpreter would take itself apart."""
    assert args[1:3] == ["-m", "ckptlib.writer"]
    sys.argv = list(args[2:])
    try:
        runpy.run_module("ckptlib.writer", run_name="__main__", alter_sys=True)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
