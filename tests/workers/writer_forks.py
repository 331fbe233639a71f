"""Forks writer processes for `helpers.forked_writers`; no torch.

python writer_forks.py <descriptor of its socket> <most bytes of a message>
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import json
import os
import runpy
import socket
import sys
import threading
import time
from typing import Any

import numpy  # noqa: F401

import ckptlib.writer.process  # noqa: F401


def serve(server: socket.socket, most: int) -> tuple[dict[str, Any], list[int]] | None:
    """Returns in each writer, with its order and its descriptors; None: in the server, whose client is gone."""
    while True:
        message, fds, _, _ = socket.recv_fds(server, most, 64)
        if not message:
            return None
        assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            server.send(b"adopted")
            for fd in fds:
                os.close(fd)
            continue
        between = os.getpid()
        writer = os.fork()
        if writer:
            server.send(str(writer).encode())
            os._exit(0)
        os.setsid()
        while os.getppid() == between:
            time.sleep(0.0005)
        return json.loads(message), fds


def place(fds: list[int], targets: list[int]) -> None:
    """Each descriptor at the number that the writer's arguments and orders name."""
    above = max(*fds, *targets) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in fds]
    for fd in fds:
        os.close(fd)
    for fd, target in zip(moved, targets, strict=True):
        os.dup2(fd, target)
        os.close(fd)


if __name__ == "__main__":
    gc.freeze()  # a collection would copy the pages of all that writers share
    with socket.socket(fileno=int(sys.argv[1])) as server:
        began = serve(server, int(sys.argv[2]))
    if began is not None:
        order, fds = began
        place(fds, order["targets"])
        os.environ.clear()
        os.environ.update(order["env"])
        sys.argv[1:] = order["args"]
        runpy.run_module("ckptlib.writer", run_name="__main__", alter_sys=True)
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)  # 0.05 s less than to take apart the modules that it shares with the server
