"""The trainer's end of its writer: starts it, orders, listens, and starts it again when it dies. No torch."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ckptlib.errors import WaitTimeout
from ckptlib.keys import SaveId
from ckptlib.writer.channel import Channel, Message

log = logging.getLogger(__name__)

MAX_DEATHS = 3
"""In a row, without a save in between; then something is wrong that another start will not mend."""


class Writer:
    """One writer process; main thread, but for `persist` and `void`, which any thread may call."""

    def __init__(self, setup: Message) -> None:
        """`setup`: the first order; it may hold secrets, so it goes over the socket."""
        self._setup = setup
        self._slots: list[str] = []
        self._open: dict[str, Message] = {}
        """By save: the last order about a save that has not been answered."""
        self._deaths = 0
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        self.log_path = _log_path(int(self._setup["rank"]))
        with self.log_path.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ckptlib.writer", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
        theirs.close()
        self._channel = Channel(ours)
        self._channel.send(self._setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    def add_slot(self, path: Path) -> None:
        """The writer opens it now, so that it outlives the trainer."""
        self._slots.append(str(path))
        self._channel.send({"op": "slot", "path": str(path)})

    def expect(self, save: SaveId) -> None:
        """A snapshot is being staged: should the trainer die now, its part will not come."""
        self._order({"op": "expect", "save": str(save)})

    def persist(self, save: SaveId, slot: Path) -> None:
        """Orders that the ready snapshot in `slot` be put; answered by `released`."""
        self._order({"op": "persist", "save": str(save), "slot": str(slot)})

    def void(self, save: SaveId, error: str) -> None:
        """The snapshot failed; tells the other ranks' committer."""
        self._order({"op": "void", "save": str(save), "error": error})

    def watch(self, save: SaveId, timeout_s: float) -> None:
        """Asks what becomes of a save that another rank commits; answered by `committed` or `failed`."""
        self._channel.send({"op": "await", "save": str(save), "timeout_s": timeout_s})

    def _order(self, message: Message) -> None:
        with self._lock:
            self._open[message["save"]] = message
            self._channel.send(message)

    def poll(self, timeout_s: float = 0.0) -> list[Message]:
        """What the writer has said since the last call; waits up to `timeout_s` for the first word.

        A writer that died is started again, with all orders that it did not answer. When it keeps dying, each of those
        is answered by a failure instead.
        """
        events = self._channel.receive(timeout_s)
        with self._lock:
            for event in events:
                if event["event"] in ("released", "failed"):
                    self._open.pop(event["save"], None)
                    self._deaths = 0
            if self._channel.closed:
                events += self._revive()
        return events

    def _revive(self) -> list[Message]:
        code = self._process.wait()
        self._deaths += 1
        self._channel.close()
        log.warning("the writer process died (exit %s, log %s); starting it again", code, self.log_path)
        failed: list[Message] = []
        if self._deaths >= MAX_DEATHS:
            for save, order in self._open.items():
                error = f"the writer process died {self._deaths} times in a row; see {self.log_path}"
                failed.append({"event": "released", "save": save, "slot": order.get("slot"), "error": error})
                failed.append({"event": "failed", "save": save, "kind": "SaveFailed", "error": error})
            self._open.clear()
        self._start()
        for path in self._slots:
            self._channel.send({"op": "slot", "path": path})
        for order in self._open.values():
            self._channel.send(order)
        return failed

    def forget_slot(self, path: Path) -> None:
        """The slot is gone."""
        if str(path) in self._slots:
            self._slots.remove(str(path))

    def close(self, timeout_s: float) -> None:
        """Lets the writer finish what was ordered. Raises WaitTimeout when it does not end in time; it goes on then."""
        self._channel.send({"op": "close"})
        began = time.monotonic()
        while self._process.poll() is None:
            if time.monotonic() - began > timeout_s:
                raise WaitTimeout(
                    f"the writer (pid {self.pid}) did not finish within {timeout_s:.0f} s; it goes on alone"
                )
            self._channel.receive(timeout_s=0.05)
        self._channel.close()
        if self.log_path.exists() and self.log_path.stat().st_size == 0:
            self.log_path.unlink()


def _log_path(rank: int) -> Path:
    directory = Path(tempfile.gettempdir()) / f"ckptlib-{os.geteuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory / f"writer-rank{rank}-{os.getpid()}.log"
