"""One writer process, as its trainer holds it: the channel to it, the end that wakes it, and its exit. No torch."""

from __future__ import annotations

import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

from ckptlib.slots.writer_lock import WriterLock
from ckptlib.writer.channel import Channel, Message
from ckptlib.writer.launch import launch
from ckptlib.writer.silence import Silence

REAP_S = 5.0
"""How long to wait for a killed writer: one whose disk hangs may stay in the kernel for ever."""

STALL_S = 10.0
"""A writer that accepts no order for this long is not running: its main thread does nothing else, and some 300 orders
are on their way by then. The training stands still meanwhile."""


class Child:
    """A running writer. For the trainer's main thread, but any thread may call `wake`, and send through the channel."""

    def __init__(self, setup: Message, log_path: Path, unread: WriterLock | None, wait_s: float) -> None:
        """Starts the writer. Raises OSError, and leaves nothing behind then. Arguments: see `Writer` and `launch`."""
        page = setup.get("account_fd")
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, STALL_S)
        self.silence = Silence(float(setup["deadline_s"]))
        self._waking = threading.Lock()
        try:
            with theirs:
                self._process = launch(theirs, log_path, wait_s, unread, None if page is None else int(page))
        except OSError:
            self.channel.close()
            raise
        self.channel.send(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wake(self) -> None:
        """Makes a waiting writer begin; see `Writer.wake`. Any thread may call it."""
        with self._waking:
            if (end := self._process.stdin) is not None and not end.closed:
                with suppress(BrokenPipeError), end:
                    end.write(b"\n")  # a forked child may keep the pipe open

    def reap(self, kill: bool = False) -> int | None:
        """Waits for the writer to exit and returns its status; None if the kernel does not let go of it."""
        if kill:
            self._process.kill()
        try:
            return self._process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            return None
