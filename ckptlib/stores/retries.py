"""Decides how long a request that met a fault which may pass is sent again."""

from __future__ import annotations

import math
import random
import time

from ckptlib.stores import io_limits

_FIRST_S = 0.2
_MOST_S = 10.0


class Retries:
    """Waits of one request, from its first failure on: longer and longer, at random, so that clients do not march in
    step (full jitter, as in https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/)."""

    def __init__(self, deadline: float | None) -> None:
        """`deadline`: by the monotonic clock; nothing is sent after it."""
        self.failures = 0
        self._began = time.monotonic()
        self._deadline = math.inf if deadline is None else deadline
        self._first_failure: float | None = None

    def wait_s(self, retry_s: float | None = None) -> float | None:
        """Returns the seconds to wait before the next try, after a failure; None if there is to be none.

        `retry_s`: for how long to try after failures of this kind, if not for RETRY_S.
        """
        now = time.monotonic()
        if self._first_failure is None:
            self._first_failure = now
        end = min(self._first_failure + (io_limits.RETRY_S if retry_s is None else retry_s), self._deadline)
        self.failures += 1
        wait_s = random.random() * min(_MOST_S, _FIRST_S * 2**self.failures)
        return None if now + wait_s >= end else wait_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first try began."""
        return time.monotonic() - self._began
