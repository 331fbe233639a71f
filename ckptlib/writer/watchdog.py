"""The writer's watchdog: nothing that a writer does outlives its deadline, whatever the store does.

A call that hangs in a thread cannot be cancelled. So each piece of work names its deadline. The watchdog reports one
that is overdue, and ends the process: the trainer starts another. No torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptlib.format.keys import SaveId
from ckptlib.stores import io_limits
from ckptlib.writer.requests import Request, Requests

TOLD_IDLES = 1.8
"""A request that has stood still for this many idle limits is told to the trainer, so before two of them are over. One
that was swallowed once has been sent again by then, and a part of 16 MiB has arrived at 1 MB/s. Larger parts, of packs
of more than 2 GiB, on connections as slow as that are told of as well, once for a save."""

SLACK_S = 30.0
"""How much later than its deadline work may end: what the store bounds by itself fails in an orderly way before."""

TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of the writer's work that uses the store."""

    what: str
    save: SaveId | None
    since: float
    deadline: float
    """By the monotonic clock, like `since`."""
    minor: bool = False
    """Whether nobody waits for it: it is given up only when nothing else would be given up with it."""


def overdue(under_way: Iterable[Work], now: float, slack_s: float) -> Work | None:
    """Returns the work that is to be given up now, if any. Pure."""
    works = list(under_way)
    late = [work for work in works if now > work.deadline + slack_s]
    major = [work for work in late if not work.minor]
    if major:
        return min(major, key=lambda work: work.deadline)
    return late[0] if late and all(work.minor for work in works) else None


def slack_of(deadline_s: float) -> float:
    """Returns how much later than `deadline_s` after its begin work may end; the shorter a save may take, the less."""
    return min(SLACK_S, deadline_s / 10)


class Watchdog:
    """Watches the work of one writer, from any thread."""

    def __init__(
        self,
        requests: Requests,
        deadline_s: float,
        on_waiting: Callable[[Work | None, Request | None], None],
        on_overdue: Callable[[Work, Request | None], None],
    ) -> None:
        """`deadline_s`: how long a save may take; the shorter it is, the less is waited elsewhere.

        `on_waiting`: told of a request that has not been answered for long, and None when it has been. `on_overdue`:
        told once of what is given up; it ends the process.
        """
        self.slack_s = slack_of(deadline_s)
        self._requests = requests
        self._waits_s = min(TOLD_IDLES * io_limits.IDLE_S, deadline_s / 10)
        self._on_waiting, self._on_overdue = on_waiting, on_overdue
        self._lock = threading.Lock()
        self._works: list[Work] = []
        self._told: Request | None = None
        self._tick_s = min(TICK_S, max(min(deadline_s, self._waits_s) / 20, 0.05))
        threading.Thread(target=self._watch, name="ckptlib-watchdog", daemon=True).start()

    @contextmanager
    def work(
        self, what: str, save: SaveId | None, deadline: float, minor: bool = False, since: float | None = None
    ) -> Iterator[None]:
        """Counts work as under way within the context; it must end by `deadline`. `since`: when its time began, if
        earlier."""
        work = Work(what, save, time.monotonic() if since is None else since, deadline, minor)
        with self._lock:
            self._works.append(work)
        try:
            yield
        finally:
            with self._lock:
                self._works.remove(work)

    def _watch(self) -> None:
        while True:
            time.sleep(self._tick_s)
            with self._lock:
                works = list(self._works)
            now, request = time.monotonic(), self._requests.oldest()
            work = overdue(works, now, self.slack_s)
            if work is not None:
                self._on_overdue(work, request)
                return
            self._tell(works, request, now)

    def _tell(self, works: list[Work], request: Request | None, now: float) -> None:
        waiting = request if request is not None and now - request.since > self._waits_s else None
        if waiting == self._told:
            return
        self._told = waiting
        self._on_waiting(min(works, key=lambda work: (work.minor, work.since), default=None), waiting)


def stuck(work: Work, request: Request | None) -> str:
    """Returns the message on work that is given up."""
    now = time.monotonic()
    what = work.what if work.save is None else f"the {work.what} of step {work.save.step}"
    told = f"{what} did not end within {work.deadline - work.since:.0f} s and is given up: "
    if request is None:
        told += "the store answers, but this took longer than a save may"
    else:
        told += f"the store has not answered {request} for {now - request.since:.0f} s"
    return told + (
        ". If the store is well and only slow, a save needs a longer save_deadline: a root keeps the one that it was "
        "made with, so save to a new root with a longer one, or less, or to a faster store"
    )
