"""Measures where training time goes, step by step, and notes it where the writer finds it even if the trainer is
killed.

This costs a step some microseconds: numbers go into a page that the writer process has mapped. No torch, no store.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from ckptlib.format.account import CLOSED, DIED, MAX_MARKS, MAX_WHY, PAGE_NBYTES, Account, Mark, ascending, write_page
from ckptlib.format.values import Json
from ckptlib.libc import memory_file


class Stopwatch:
    """The stopwatch of one session; main thread."""

    def __init__(self) -> None:
        self._began, self._began_at = time.time(), time.monotonic()
        self._restoring_s = 0.0
        self._stalled_s = 0.0
        self._fence_s = 0.0
        self._stalls = 0
        """How many stalls are open."""
        self._stall_began = 0.0
        """When the outermost of them began."""
        self._num_saves = 0
        self._first: Mark | None = None
        self._last: Mark | None = None
        self._saves: deque[Mark] = deque(maxlen=MAX_MARKS)
        self._end: str | None = None
        self._tier: str | None = None
        self._why = ""
        self._measured: dict[str, Json] = {}
        self._trains = False
        self._fd = -1
        self._page: memoryview | None = None

    def share(self) -> int | None:
        """Returns a file with the page, for the writer to inherit; None if the system has no memory for it."""
        try:
            self._fd = memory_file("ckptlib-account")
            os.truncate(self._fd, PAGE_NBYTES)
            self._page = memoryview(mmap.mmap(self._fd, PAGE_NBYTES))
        except OSError:
            return None
        return self._fd

    def restored(self, tier: str | None = None) -> None:
        """Notes that the state is ready: a step was restored from this tier; None if there was none."""
        if self._first is None:
            self._tier = tier
            self._restoring_s = self._now
            self._stalled_s, self._num_saves = 0.0, 0
            self._trains = True
            self._write(self._now)

    def note_interval(self, why: str) -> None:
        """Notes why saves are as frequent as they are from now on."""
        self._why = why[:MAX_WHY]

    def note_measured(self, measured: dict[str, Json]) -> None:
        """Notes what saves were measured to cost so far, for the next start."""
        self._measured = measured

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Counts the time within as a wait of the training."""
        self._stall()
        try:
            yield
        finally:
            self._go_on(self._now)

    def _stall(self) -> None:
        if not self._stalls:
            self._stall_began = self._now
        self._stalls += 1

    def _go_on(self, now: float) -> None:
        if self._stalls == 1:
            self._stalled_s += now - self._stall_began
        self._stalls = max(self._stalls - 1, 0)  # an interrupted caller may not have counted its stall

    def begin_step(self, step: int, fence_s: float) -> None:
        """Notes that `step` steps are done; called by `after_step`. `fence_s`: seconds waited at the fence so far.

        Not a context manager: that would add a tenth to the cost of a step that saves nothing.
        """
        self._fence_s, self._trains = fence_s, True
        if self._first is None:
            self._first = Mark(step - 1, 0.0, 0.0)
        self._stall()

    def end_step(self, step: int, failed: bool) -> None:
        """Notes that training goes on, or ends with an error: then the account of the step before counts."""
        now = self._now
        self._go_on(now)
        if not failed:
            self._last = self._mark(step, now)
            self._write(now)

    def snapshot(self, step: int) -> dict[str, Json]:
        """Returns the account for the manifest of a snapshot taken after `step` steps; empty if no loop is seen."""
        if not self._trains:
            return {}
        self._num_saves += 1
        if self._first is not None:
            mark = self._mark(step, self._now)
            if self._saves and self._saves[-1].step >= mark.step:
                self._saves.pop()
            self._saves.append(mark)
        account = self._account(self._saves[-1] if self._saves else None, self._now).to_json()
        why: dict[str, Json] = {"interval_why": self._why} if self._why else {}
        return {**account, **why, **({"measured": self._measured} if self._measured else {})}

    def close(self, clean: bool) -> None:
        """Notes the end. `clean`: the job came to its end, or was told to stop and saved."""
        self._end = CLOSED if clean else DIED
        if self._trains:
            self._write(self._now)

    def let_go(self) -> None:
        """Lets go of the page; the writer has its own hold of it."""
        self._page = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began_at

    def _mark(self, step: int, now: float) -> Mark:
        """Returns a mark of the time up to now; inside of a stall, up to its beginning."""
        if self._stalls:
            now = self._stall_began
        stalled_s = self._stalled_s + self._fence_s
        return Mark(step, max(now - self._restoring_s - stalled_s, 0.0), stalled_s)

    def _account(self, last: Mark | None, now: float) -> Account:
        marks = ascending(filter(None, (self._first, *self._saves, last)))
        return Account(self._began, now, self._restoring_s, self._end, self._num_saves, marks, self._tier)

    def _write(self, now: float) -> None:
        if self._page is not None:
            write_page(self._page, self._account(self._last, now), self._began_at)
