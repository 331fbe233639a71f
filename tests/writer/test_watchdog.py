"""What is given up, and when: nothing outlives its deadline, and nothing that goes well is given up for a trifle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import pytest
from typing_extensions import Buffer

from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.stores import io_limits
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer.requests import NotedStore, Request, Requests
from ckptlib.writer.watchdog import TICK_S, TOLD_IDLES, Watchdog, Work, overdue

SAVE = SaveId(5, GenerationId(1, "00000001"))
PERSIST = Work("persist", SAVE, 0.0, 100.0)
COMMIT = Work("commit", SAVE, 10.0, 90.0)
SWEEP = Work("sweep", None, 0.0, 50.0, minor=True)


def test_nothing_is_given_up_before_its_deadline_and_some_slack() -> None:
    for now in (0.0, 90.0, 100.0, 110.0):
        assert overdue([PERSIST], now, slack_s=10.0) is None
    assert overdue([PERSIST], 110.1, slack_s=10.0) is PERSIST


def test_the_first_deadline_counts() -> None:
    assert overdue([PERSIST, COMMIT], 500.0, slack_s=0.0) is COMMIT


def test_a_sweep_that_hangs_ends_no_save() -> None:
    assert overdue([SWEEP, PERSIST], 60.0, slack_s=0.0) is None
    assert overdue([SWEEP], 60.0, slack_s=0.0) is SWEEP
    assert overdue([SWEEP, PERSIST], 101.0, slack_s=0.0) is PERSIST


def test_what_stands_still_for_longest_is_named_and_what_moves_is_not() -> None:
    requests = Requests()
    store = NotedStore(MemoryStore(), requests)
    seen: list[str] = []

    with requests.note("get", "old"):
        first = requests.oldest()
        assert first is not None
        assert str(first) == "get old"

        def some() -> Iterator[bytes]:
            for _ in range(3):
                found = [*requests._under_way.values()]
                seen.append(str(max(found, key=lambda request: request.since)))
                yield b"x" * 10

        store.put("new", b"head", some())
        assert requests.oldest() == first
    assert seen == ["put new"] * 3
    assert requests.oldest() is None
    assert store.get("new") == b"head" + b"x" * 30


def test_a_put_that_takes_pieces_moves_and_waits_for_nobody_while_they_are_made() -> None:
    requests = Requests()
    began = []

    class Seen(MemoryStore):
        def put(self, key: str, head: object, pieces: Iterable[Buffer] = (), **more: object) -> None:  # type: ignore[override]
            for _ in pieces:
                request = requests.oldest()
                assert request is not None
                began.append(request.since)

    def pieces() -> Iterator[bytes]:
        for _ in range(3):
            assert requests.oldest() is None, "the store is not what is waited for"
            time.sleep(0.002)
            yield b"x"

    NotedStore(Seen(), requests).put("key", b"", pieces())
    assert began == sorted({*began}), "each piece is progress"
    assert len(began) == 3


def test_what_waits_is_told_before_two_idle_limits_are_over() -> None:
    """With the limits that users have, and a save deadline of minutes or more."""
    assert TOLD_IDLES * io_limits.IDLE_S + TICK_S < 2 * io_limits.IDLE_S
    assert TOLD_IDLES * io_limits.IDLE_S > io_limits.PART_NBYTES / io_limits.SLOWEST_BPS, "no part that still moves"


def test_an_error_ends_a_request() -> None:
    requests = Requests()
    store = NotedStore(MemoryStore(), requests)
    with pytest.raises(KeyError):
        store.get("absent")
    assert requests.oldest() is None


def test_it_tells_what_waits_once_and_what_is_overdue() -> None:
    requests, told = Requests(), list[str]()
    ended, answered = threading.Event(), threading.Event()

    def waiting(work: Work | None, request: Request | None) -> None:
        told.append(f"{request} of {work.what if work else None}")
        if request is None:
            answered.set()

    def late(work: Work, request: Request | None) -> None:
        told.append(f"{work.what} is late at {request}")
        ended.set()

    watchdog = Watchdog(requests, 1.0, waiting, late)
    with watchdog.work("persist", SAVE, time.monotonic() + 60):
        with requests.note("put", "packs/1"):
            while not told:
                time.sleep(0.01)
        assert answered.wait(60)
    with watchdog.work("commit", SAVE, time.monotonic() - 1), requests.note("list", "parts/"):
        assert ended.wait(60)
    assert told[0] == "put packs/1 of persist"
    assert told[1].startswith("None of ")
    assert told[-1] == "commit is late at list parts/"
    assert told.count("put packs/1 of persist") == 1
