"""Progress of long operations: a line that moves on a terminal; and the time of each phase."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SHOW_AFTER_S = 1.0
"""A shorter operation shows no progress."""

REFRESH_S = 0.2


class Laps:
    """Seconds by phase of an operation whose phases follow one another."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        """Adds the time since the last call to this phase; phases of one name add up."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@contextmanager
def progress(what: str, total_bytes: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """Yields a function that any thread tells of bytes done. Shows progress on stderr if it is a terminal."""
    visible = shown and sys.stderr is not None and sys.stderr.isatty()
    lock = threading.Lock()
    began = last = time.monotonic()
    done, drawn = 0, False

    def advance(nbytes: int) -> None:
        nonlocal done, last, drawn
        with lock:
            done += nbytes
            now = time.monotonic()
            if visible and now - began > SHOW_AFTER_S and now - last > REFRESH_S:
                last, drawn = now, True
                share = min(1.0, done / total_bytes) if total_bytes else 1.0
                rate = done / (now - began) / 1e9
                sys.stderr.write(f"\r{what}: {share:4.0%} of {total_bytes:,} bytes, {rate:.2f} GB/s")
                sys.stderr.flush()

    try:
        yield advance
    finally:
        if drawn:
            sys.stderr.write("\n")
