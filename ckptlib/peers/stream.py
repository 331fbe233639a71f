"""One direction of one pair of ranks: a thread that does its transfers in order, and what was told of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Concatenate

from ckptlib.errors import CkptError
from ckptlib.jobs import Given, JobThread
from ckptlib.ranks.link import Link

log = logging.getLogger(__name__)


class Stream:
    """The transfers of replicas in one direction."""

    def __init__(self, name: str, what: str) -> None:
        """`what`: how messages call the replicas."""
        self.thread = JobThread(name)
        self._what = what
        self._is_failing = False
        """Whether a failure was told, and no success since."""

    def put(
        self, link: Link, job: Callable[Concatenate[Link, Given], None], *args: Given.args, **kwargs: Given.kwargs
    ) -> None:
        """Adds a transfer, which runs after those before it."""

        def guarded() -> None:
            try:
                job(link, *args, **kwargs)
            except Exception:  # a bug, or no memory: the other end would take the next message for the missing one
                log.exception("a replica failed")
                link.cut()

        self.thread.put(guarded)

    def tell(self, step: int, error: CkptError | None) -> None:
        """Warns of the first failure and of the first success after it: there may be a snapshot at every step."""
        if error is None and self._is_failing:
            self._is_failing = False
            log.warning("%s: there is one of step %d again", self._what, step)
        elif error is not None and not self._is_failing:
            self._is_failing = True
            log.warning("%s: there is none of step %d: %s", self._what, step, error)
