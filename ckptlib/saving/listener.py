"""Queues events for the user's function until training can wait for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ckptlib.events import Event

log = logging.getLogger(__name__)


def check_listener(on_event: object) -> None:
    """Raises TypeError if `on_event` is neither a callable nor None."""
    if on_event is not None and not callable(on_event):
        raise TypeError(f"on_event={on_event!r}: expected a function of an event, such as print")


class Listener:
    """Calls the user's functions for one session; main thread. None of them runs between two collectives, nor holds up
    a copy."""

    def __init__(self, on_event: Callable[[Event], object] | None) -> None:
        self._on_event = on_event
        self._queue: deque[tuple[str, Callable[[], object]]] = deque()
        self._delivering = threading.Lock()
        self._told: set[str] = set()
        """Names of functions that have raised; each was logged once."""

    def tell(self, event: Event) -> None:
        """Queues an event; `deliver` passes it on."""
        on_event = self._on_event
        if on_event is not None:
            self._queue.append(("on_event=", lambda: on_event(event)))

    def call(self, what: str, function: Callable[[], object]) -> None:
        """Queues a call, which `deliver` makes. `what`: its name in messages."""
        self._queue.append((what, function))

    def deliver(self) -> None:
        """Calls the user's functions with the queued events. Their errors are logged and harm nothing."""
        # If the lock is taken, another thread, or a user's function that came back here, delivers the rest. An event
        # that came just before the release is looked for after it: nobody else would deliver it.
        while self._queue and self._delivering.acquire(blocking=False):
            try:
                self._deliver()
            finally:
                self._delivering.release()

    def _deliver(self) -> None:
        while self._queue:
            what, function = self._queue.popleft()
            try:
                function()
            except Exception:
                if what not in self._told:
                    self._told.add(what)
                    log.exception("%s raised; saves go on, and it is called again; said once", what)
