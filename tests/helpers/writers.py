"""A writer of its own, without a trainer: what it is told, and what it says."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from workers.crash_spare import make_root, ready_slot, setup

from ckptlib.format.keys import SaveId
from ckptlib.slots.slot import Slot
from ckptlib.writer.client import Writer

WAIT_S = 150.0


class Bench:
    """A root, a writer, and slots for it."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self.directory = directory
        self.generation = make_root(self.root)
        self.slots: list[Slot] = []
        self.writers: list[Writer] = []

    def writer(self, **more: object) -> Writer:
        self.writers.append(Writer(setup(self.root, **more)))
        return self.writers[-1]

    def slot(
        self, step: int, memory: Path = Path("/dev/shm"), nbytes: int = 1 << 20, content: int | None = None
    ) -> tuple[SaveId, Slot]:
        """`content`: the step whose values it has; None: its own."""
        save = SaveId(step, self.generation)
        values = np.arange(nbytes // 4, dtype=np.int32) + (step if content is None else content)
        self.slots.append(ready_slot(memory, save, {"w": values}))
        return save, self.slots[-1]

    def close(self) -> None:
        for writer in self.writers:
            if alive(writer.pid):
                os.kill(writer.pid, signal.SIGCONT)
                os.kill(writer.pid, signal.SIGKILL)
        for slot in self.slots:
            slot.unlink()


def alive(pid: int) -> bool:
    """Whether any thread is left: the first one is a zombie soon, and its locks are held until the last has ended."""
    try:
        return _state(pid) not in "ZX" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):  # taken in meanwhile
        return False


def stop(pid: int) -> None:
    """Until it gets SIGCONT."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _state(pid) == "T")


def _state(pid: int) -> str:
    """As /proc has it; X: gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it went before the file was opened, or before it was read
        return "X"


def hear(writer: Writer, event: str) -> dict[str, Any]:
    """The next event of this kind; what comes before it is dropped."""
    return next(found for found in heard(writer, event) if found["event"] == event)


def heard(writer: Writer, last: str) -> list[dict[str, Any]]:
    """All that the writer says up to an event of this kind."""
    deadline, events = time.monotonic() + WAIT_S, []
    while last not in [found["event"] for found in events]:
        assert time.monotonic() < deadline, f"{last} was not heard: {events}; see {writer.log_path.read_text()}"
        events += writer.poll(0.05)
    return events


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def status(pid: int, name: str) -> int:
    return int(re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.M)[1])  # type: ignore[index]
