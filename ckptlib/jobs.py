"""A thread that does jobs in order: the staging's, the replicator's, the writer's. It does not know what they do."""

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
    """It does its jobs one after the other, in the order in which they were put. An error of a job ends it.

    It begins with the first one, or by `start`: whoever made it and was interrupted before has nothing to end.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_open = 0
        self._lock = threading.Lock()
        self._name = f"ckptlib-{name}"
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether a job that was put has not come to its end."""
        return self._num_open > 0

    def start(self) -> None:
        """It runs from now on, where a `put` must not be the one to find that the system has no thread more. Raises
        RuntimeError then."""
        with self._lock:
            if self._thread is None:
                self._begin()

    def put(self, job: Job) -> None:
        """From any thread. Raises RuntimeError where it does not run, and the system has no thread for it."""
        with self._lock:
            if self._thread is None:
                self._begin()
            self._num_open += 1
        self._jobs.put(job)

    def _begin(self) -> None:
        """Where it is interrupted, as by Ctrl-C, the thread may run or not: the next job begins another, with a queue
        of its own."""
        jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(jobs,), name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            jobs.put(None)
            raise
        self._jobs, self._thread = jobs, thread

    def finish(self) -> None:
        """Waits for all jobs. None may be put after it."""
        self.leave()
        if self._thread is not None:
            self._thread.join()

    def leave(self) -> None:
        """Waits for nothing: the thread ends behind its last job. None may be put after it."""
        if self._thread is not None:
            self._jobs.put(None)

    def _run(self, jobs: queue.SimpleQueue[Job | None]) -> None:
        while (job := jobs.get()) is not None:
            try:
                job()
            finally:
                del job  # with all that it refers to, until the next one
                with self._lock:
                    self._num_open -= 1


class JobFutures:
    """Jobs of one thread whose results are asked for. Unlike that of a ThreadPoolExecutor, it keeps no process from
    ending: who wants the last ones done waits for them."""

    def __init__(self, name: str) -> None:
        self._thread = JobThread(name)

    def submit(self, call: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs) -> Future[Result]:
        """In the order in which they are given."""
        future: Future[Result] = Future()
        self._thread.put(partial(fulfil, future, partial(call, *args, **kwargs)))
        return future

    def finish(self) -> None:
        """Waits for all jobs. None may be submitted after it."""
        self._thread.finish()

    def leave(self) -> None:
        """Waits for nothing: the thread ends behind its last job. None may be submitted after it."""
        self._thread.leave()


def fulfil(future: Future[Result], call: Callable[[], Result]) -> None:
    """Gives the future what `call` returns or raises, unless it was cancelled."""
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(call())
    except BaseException as error:  # whoever waits for the future is told of any
        future.set_exception(error)
    finally:
        del future  # else its error, whose trace has this frame, stays until garbage is collected


def at_exit(job: Job) -> None:
    """Has a job done as this process ends, once; not as one ends that is forked from it. The last one is done first."""
    _at_exit(job, os.getpid())


@cache
def _at_exit(job: Job, pid: int) -> None:
    atexit.register(lambda: job() if os.getpid() == pid else None)
