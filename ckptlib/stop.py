"""The signal by which a job is told to stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopSignal:
    """Notes SIGTERM, where nobody else handles it; the second one kills as ever."""

    def __init__(self) -> None:
        self.wanted = False
        self._installed = False
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._note)
            self._installed = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self.remove()

    def remove(self) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._installed = False
