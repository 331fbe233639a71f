"""The trainer, as its writer sees it: whether it is there, and until when work goes on without it. No torch."""

from __future__ import annotations

import os
import time

from ckptlib.writer.channel import readable

ORPHAN_DEADLINE_S = 60.0
"""How long a committer whose trainer is gone still waits for other ranks."""

_LOOK_S = 1.0
"""How often to look whether the trainer lives, where no pidfd tells when it dies."""


class Trainer:
    """Watches one trainer, whose writer finishes its orders when it is gone."""

    def __init__(self, pid: int) -> None:
        """Watches the trainer, whose child this process is, by pidfd: a pipe's end may have been inherited by its other
        children. Linux before 5.3, old filters of containers and the Pythons of conda have none; then it looks."""
        self._pid = pid
        self._fd = _pidfd(pid)
        self._gone_since: float | None = None
        self._closed_at: float | None = None
        self.deadline_s = 0.0
        """How long a save may take; see `setup`."""

    def wait(self, orders: int) -> None:
        """Returns when there is something to be read, or the trainer has died."""
        if self._fd is not None:
            readable(orders, self._fd, timeout_s=None)
            return
        while not self.dead and not readable(orders, timeout_s=_LOOK_S):
            pass

    @property
    def dead(self) -> bool:
        return os.getppid() != self._pid if self._fd is None else readable(self._fd, timeout_s=0)

    @property
    def gone(self) -> bool:
        """Whether `leave` was called."""
        return self._gone_since is not None

    def leave(self) -> None:
        """Notes that the trainer is gone, and that all its orders were read."""
        self._gone_since = time.monotonic()

    def close(self) -> None:
        """Notes that the trainer said that there will be no more orders."""
        self._closed_at = time.monotonic()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed_at is not None

    def stops_draining(self) -> float:
        """Returns when drains stop, by the monotonic clock; infinity while the trainer lives and has not closed."""
        if self._gone_since is not None:
            return self._gone_since + ORPHAN_DEADLINE_S
        return float("inf") if self._closed_at is None else self._closed_at + self.deadline_s

    def seconds_left(self, began: float) -> float:
        """Returns the time until a save is given up: less when the trainer is gone, since other ranks may be, too."""
        deadline = began + self.deadline_s
        if self._gone_since is not None:
            deadline = min(deadline, max(began, self._gone_since) + ORPHAN_DEADLINE_S)
        return deadline - time.monotonic()


def _pidfd(pid: int) -> int | None:
    """Returns a pidfd of this process's parent; None if there is none, or if the parent died while this process was
    starting."""
    try:
        fd = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
    if os.getppid() != pid:
        os.close(fd)
        return None
    return fd
