"""Threads that do jobs in order: the staging's, the replicator's, the writer's. They do not know what the jobs do."""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache, partial
from typing import TypeVar

from typing_extensions import ParamSpec

Job = Callable[[], None]
Given = ParamSpec("Given")
Result = TypeVar("Result")


class JobThread:
    """Does its jobs one after the other, in the order in which they were put. An error of a job ends it.

    Begins with the first job, or by `start`: a caller that is interrupted before that has nothing to end.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_open = 0
        self._lock = threading.Lock()
        self._name = f"ckptlib-{name}"
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a job that was put has not ended."""
        return self._num_open > 0

    def start(self) -> None:
        """Starts the thread now, if a `put` must not be the one to find that the system has no more threads. Raises
        RuntimeError if it has none."""
        with self._lock:
            if self._thread is None:
                self._begin()

    def put(self, job: Job) -> None:
        """Adds a job, from any thread. Raises RuntimeError if the thread must be started and the system has none."""
        with self._lock:
            if self._thread is None:
                self._begin()
            self._num_open += 1
        self._jobs.put(job)

    def _begin(self) -> None:
        """Starts the thread. If this is interrupted, as by Ctrl-C, the thread may run or not: the next job begins
        another one, with its own queue."""
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(jobs,), name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            jobs.put(None)
            raise
        self._jobs, self._thread = jobs, thread

    def finish(self) -> None:
        """Waits for all jobs. None may be put afterwards."""
        self.leave()
        if self._thread is not None:
            self._thread.join()

    def leave(self) -> None:
        """Lets the thread end after its last job, without waiting. No job may be put afterwards."""
        if self._thread is not None:
            self._jobs.put(None)

    def _run(self, jobs: queue.SimpleQueue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            finally:
                del job  # with everything that it refers to, before the wait for the next job
                with self._lock:
                    self._num_open -= 1


class JobFutures(JobThread):
    """Returns the results of its jobs, too. Unlike a ThreadPoolExecutor's, the thread keeps no process from ending:
    wait for the last jobs if you want them done."""

    def submit(self, call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Future[Result]:
        """Adds a call, which runs after those given before, and returns its future."""
        future: Future[Result] = Future()
        self.put(partial(fulfil, future, partial(call, *args, **kwargs)))
        return future


def fulfil(future: Future[Result], call: Callable[[], Result]) -> None:
    """Gives the future what `call` returns or raises, unless it was cancelled."""
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(call())
    except BaseException as error:  # whoever waits for the future gets any error
        future.set_exception(error)
    finally:
        del future  # otherwise its error, whose trace has this frame, stays until garbage is collected


def at_exit(job: Job) -> None:
    """Runs a job once when this process exits, but not when a forked child exits. The last one added runs first."""
    _at_exit(job, os.getpid())


@cache
def _at_exit(job: Job, pid: int) -> None:
    atexit.register(lambda: job() if os.getpid() == pid else None)
