"""Asks the user's function whether the job is to stop, such as by a file, or the metadata service of a cloud."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Seconds between two questions. Clouds that warn do so 30 seconds before the end, or earlier."""


def check_preempted(preempted: object) -> None:
    """Raises TypeError unless the argument is None or callable."""
    if preempted is not None and not callable(preempted):
        raise TypeError(
            f"preempted={preempted!r}: expected a function that says whether the job is to stop, such as "
            "lambda: Path('/tmp/stop').exists()"
        )


class Preemption:
    """Asks in a thread, since an answer may take its time. An answer that does not come counts as no."""

    def __init__(self, preempted: Callable[[], bool]) -> None:
        self.wanted = False
        self._preempted = preempted
        self._ended = threading.Event()
        self._told = False
        threading.Thread(target=self._run, name="ckptlib-preempted", daemon=True).start()

    def _run(self) -> None:
        while not self.wanted and not self._ended.is_set():
            self.wanted = self._ask()
            self._ended.wait(EVERY_S)

    def _ask(self) -> bool:
        try:
            return bool(self._preempted())
        except Exception as error:
            if not self._told:
                self._told = True
                log.warning("preempted=: %r; taken for no, and asked again; said once", error)
            return False

    def close(self) -> None:
        """Ends the thread after the question that it may be asking."""
        self._ended.set()
