"""The channel between trainer and writer: lines of JSON over a socket pair, so that no secret is in an argument."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from typing import Any

Message = dict[str, Any]

PROTOCOL = 10
"""Version of the protocol; a trainer and a writer of other versions of ckptlib do not understand each other."""


class Channel:
    """One end of the channel. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket, stall_s: float | None = None) -> None:
        """`stall_s`: for how many seconds the other end may accept nothing of a message; None: no limit."""
        self._socket = end
        self._stall_s = stall_s
        self._arrivals = _poller(select.POLLIN, end.fileno())
        self._received = b""
        self._sending = threading.Lock()
        self.closed = False
        """Whether the other end is gone, and all that it sent has been received."""
        self.stalled = False
        """Whether the other end accepted nothing for too long. Nothing more is sent then."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message, if the other end is still there; `receive` tells when it is not."""
        data = memoryview(json.dumps(message).encode() + b"\n")
        with self._sending, contextlib.suppress(OSError):
            while data and not self.stalled:
                try:
                    data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
                except BlockingIOError:
                    self.stalled = not _ready(_poller(select.POLLOUT, self._socket.fileno()), self._stall_s)

    def wait(self, timeout_s: float) -> None:
        """Returns when a message is here, or the time has passed. Any thread may call it."""
        if (fd := self._socket.fileno()) >= 0 and not self.closed:
            readable(fd, timeout_s=timeout_s)
        else:  # nobody is there to wait for
            time.sleep(timeout_s)

    def receive(self, timeout_s: float | None) -> list[Message]:
        """Returns all messages that are here, or the first to come within the time-out; none after it, or at the
        end."""
        if b"\n" not in self._received and not self._fill(timeout_s):
            return []
        while self._fill(0):
            pass
        *lines, rest = self._received.split(b"\n")
        messages = [json.loads(line) for line in lines]
        self._received = rest  # not before: if Ctrl-C interrupts the lines above, the next call finds all messages
        return messages

    def _fill(self, timeout_s: float | None) -> bool:
        if self.closed or not _ready(self._arrivals, timeout_s):
            return False
        try:
            data = self._socket.recv(1 << 20)
        except OSError:  # whatever it was, nothing more is received: the other end, if still there, must know
            data = b""
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self.closed = not data
        self._received += data
        return bool(data)

    def close(self) -> None:
        """Closes the channel. The other end sees that, even if a child forked from this process has the socket open."""
        with contextlib.suppress(OSError):  # the other end is gone already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.closed = True


def readable(*fds: int, timeout_s: float | None) -> bool:
    """Returns whether one of these descriptors can be read, or is at its end, within the time-out; None: no limit.

    Uses poll, since select takes no descriptor from 1024 up, and a trainer may have thousands of files open.
    """
    return _ready(_poller(select.POLLIN, *fds), timeout_s)


def _poller(event: int, *fds: int) -> select.poll:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, event)
    return poller


def _ready(poller: select.poll, timeout_s: float | None) -> bool:
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))
