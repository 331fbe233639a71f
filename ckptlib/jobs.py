"""A thread that does jobs in order: the staging's, the replicator's, the writer's. It does not know what they do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]


class JobThread:
    """It does its jobs one after the other, in the order in which they were put. An error of a job ends it."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_open = 0
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"ckptlib-{name}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a job that was put has not come to its end."""
        return self._num_open > 0

    def put(self, job: Job) -> None:
        """From any thread."""
        with self._lock:
            self._num_open += 1
        self._jobs.put(job)

    def finish(self) -> None:
        """Waits for all jobs. None may be put after it."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            finally:
                with self._lock:
                    self._num_open -= 1
