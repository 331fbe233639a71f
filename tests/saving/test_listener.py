"""What the user is told, and what becomes of what his functions raise."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from ckptlib.events import Event, Held
from ckptlib.saving.listener import Listener


def test_events_wait_for_deliver_and_come_in_order() -> None:
    told: list[Event] = []
    listener = Listener(told.append)
    listener.tell(Held(1))
    listener.call("other", lambda: told.append(Held(2)))
    listener.tell(Held(3))
    assert told == []
    listener.deliver()
    listener.deliver()
    assert told == [Held(1), Held(2), Held(3)]


def test_what_raises_is_logged_once_by_name_and_the_rest_is_told(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []

    def on_event(event: Event) -> None:
        told.append(event)
        raise RuntimeError(f"no room for {event.step}")

    listener = Listener(on_event)
    for step in range(3):
        listener.tell(Held(step))
    listener.call("other", lambda: 1 / 0)
    listener.deliver()
    assert told == [Held(0), Held(1), Held(2)]
    assert [(r.levelno, r.getMessage()) for r in caplog.records] == [
        (logging.ERROR, f"{what} raised; saves go on, and it is called again; said once")
        for what in ("on_event=", "other")
    ]
    assert "RuntimeError: no room for 0" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_an_event_that_comes_of_an_event_is_told_after_it() -> None:
    """Not within it, however deep the calls are."""
    told: list[str] = []

    def on_event(event: Event) -> None:
        told.append(f"begin {event.step}")
        if event.step < 3:
            listener.tell(Held(event.step + 1))
            listener.deliver()
        told.append(f"end {event.step}")

    listener = Listener(on_event)
    listener.tell(Held(1))
    listener.deliver()
    assert told == [f"{what} {step}" for step in (1, 2, 3) for what in ("begin", "end")]


def test_an_interrupt_is_no_failure_of_the_function() -> None:
    told: list[Event] = []

    def on_event(event: Event) -> None:
        told.append(event)
        if len(told) == 1:
            raise KeyboardInterrupt

    listener = Listener(on_event)
    listener.tell(Held(1))
    listener.tell(Held(2))
    with pytest.raises(KeyboardInterrupt):
        listener.deliver()
    listener.deliver()
    assert told == [Held(1), Held(2)]


class _AtTheLastMoment:
    """A lock; another thread has something to tell just before it is released for the first time."""

    def __init__(self, tells: Callable[[], None]) -> None:
        self._lock, self._tells = threading.Lock(), [tells]

    def acquire(self, blocking: bool) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        for tells in self._tells:
            self._tells = []
            tells()
        self._lock.release()


def test_what_another_thread_tells_as_a_delivery_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds somebody at it, and leaves it to them: nobody may come again, as behind `close`."""
    told: list[Event] = []
    listener = Listener(told.append)

    def tells() -> None:
        listener.tell(Held(2))
        listener.deliver()
        assert told == [Held(1)]

    monkeypatch.setattr(listener, "_delivering", _AtTheLastMoment(tells))
    listener.tell(Held(1))
    listener.deliver()
    assert told == [Held(1), Held(2)]
