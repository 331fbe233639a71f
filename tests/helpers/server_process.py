"""A server that a test starts, kills and starts again: same command, same ports, same data.

It ends with pytest, however that ends.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from typing_extensions import Self

START_TIMEOUT_S = 150.0
_LOG_NBYTES = 4000
_PORTS = range(12_000, 22_000)
"""Below those that the kernel lends to clients (from 32768), even with 10000 added: no client takes a port of a killed
server before it is started again."""
_NUM_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_OWN_PORTS = _PORTS[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _NUM_WORKERS :: _NUM_WORKERS]
"""Of this worker of pytest-xdist: no other one takes a port between the look at it and the start of its server."""


def free_ports(num: int, beside: int = 0) -> list[int]:
    """Ports of loopback that nobody listens on; nor on those that are `beside` higher."""
    found: list[int] = []
    for port in random.sample(_OWN_PORTS, len(_OWN_PORTS)):  # at random: other sessions of pytest look for some, too
        if port not in found and _is_free(port) and _is_free(port + beside):
            found.append(port)
        if len(found) == num:
            return found
    raise RuntimeError(f"fewer than {num} of the ports {_OWN_PORTS} are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or a port is taken for a minute after its use
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def answers(port: int) -> bool:
    """Whether an HTTP server of loopback answers at all, be it with an error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


class ServerProcess:
    """One server. Started when its context is entered, killed when that is left: its data is for the test alone."""

    def __init__(
        self, command: Sequence[str], directory: Path, is_ready: Callable[[], bool], environ: Mapping[str, str]
    ) -> None:
        self._command = list(command)
        self._directory = directory
        self._is_ready = is_ready
        self._environ = {**os.environ, "HOME": str(directory), **environ}
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self._directory / "log"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server does not run"
        return self._process.pid

    def start(self) -> None:
        """Returns when the server answers."""
        assert self._process is None, "the server runs already"
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._directory,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is pytest's; it ends the servers itself
            )
        # Kills the server when its stdin ends, which is when pytest does, even by SIGKILL. PR_SET_PDEATHSIG would kill
        # it when the thread ends that started it.
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", 'read _; kill -9 "$0"', str(self.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._wait_until_ready(time.monotonic() + START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def _wait_until_ready(self, end: float) -> None:
        while not self._is_ready():
            code = self._process.poll() if self._process else None
            if code is not None or time.monotonic() > end:
                what = f"ended with {code}" if code is not None else f"did not answer within {START_TIMEOUT_S:.0f} s"
                log = self.log.read_text(errors="replace")[-_LOG_NBYTES:]
                raise RuntimeError(f"{self._command[0]} {what}; its log ends with:\n{log}")
            time.sleep(0.03)

    def kill(self) -> None:
        """SIGKILL. What it had made durable is there after the next `start`."""
        if self._process is None or self._guard is None:
            return
        self._guard.kill()  # first, so that it never kills a process that is given the same number
        self._guard.wait()
        if self._guard.stdin:
            self._guard.stdin.close()
        self._process.kill()  # also when paused
        self._process.wait()
        self._process = self._guard = None

    def pause(self) -> None:
        """SIGSTOP: connections are accepted by the kernel and nothing is read or answered, until `resume`."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
