"""Pauses of the garbage collector: by several threads at once, and in a process that is forked meanwhile."""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from ckptlib.format import gc_pause


class Elsewhere:
    """Another thread, in a pause."""

    def __init__(self) -> None:
        self._inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._pause)
        self._thread.start()
        assert self._inside.wait(60)

    def _pause(self) -> None:
        with gc_pause.kept():
            self._inside.set()
            self._leave.wait(60)

    def end(self) -> None:
        """Returns when it has left the pause."""
        self._leave.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture
def elsewhere() -> Iterator[Elsewhere]:
    found = Elsewhere()
    yield found
    found.end()


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    """Whatever a test leaves."""
    gc.enable()
    yield
    gc.enable()


def in_child(holds: Callable[[], bool]) -> bool:
    """What holds in a forked child."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, since there are threads
        child = os.fork()
    if not child:
        failed = 1
        try:
            failed = not holds()
        finally:
            os._exit(failed)
    return os.waitpid(child, 0)[1] == 0


def test_nothing_is_collected_until_it_is_said() -> None:
    with gc_pause.kept() as collect_again:
        assert not gc.isenabled()
        collect_again()
        assert gc.isenabled()
        with gc_pause.kept():
            assert not gc.isenabled()
        collect_again()
    assert gc.isenabled()


def test_what_the_user_has_disabled_stays_disabled() -> None:
    gc.disable()
    with gc_pause.kept(), gc_pause.kept():
        pass
    assert not gc.isenabled()


def test_the_last_thread_that_leaves_enables_it(elsewhere: Elsewhere) -> None:
    with gc_pause.kept():
        elsewhere.end()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_thread_that_leaves_earlier_does_not(elsewhere: Elsewhere) -> None:
    with gc_pause.kept():
        pass
    assert not gc.isenabled()
    elsewhere.end()
    assert gc.isenabled()


def test_a_pause_begins_just_as_that_of_another_thread_ends(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may go on with the other thread at whatever a pause asks of the collector."""
    disable = gc.disable

    def late() -> None:
        elsewhere.end()
        disable()

    monkeypatch.setattr(gc, "disable", late)
    with gc_pause.kept():
        monkeypatch.undo()
    elsewhere.end()
    assert gc.isenabled()


def test_a_child_that_is_forked_while_another_thread_pauses_collects(elsewhere: Elsewhere) -> None:
    assert in_child(gc.isenabled)
    assert not gc.isenabled()


def test_a_child_that_is_forked_just_as_a_pause_begins_collects(monkeypatch: pytest.MonkeyPatch) -> None:
    disable, found = gc.disable, list[bool]()

    def forked() -> None:
        disable()
        found.append(in_child(gc.isenabled))

    monkeypatch.setattr(gc, "disable", forked)
    with gc_pause.kept():
        assert not gc.isenabled()
    assert found == [True]
    assert gc.isenabled()


def test_a_child_that_is_forked_in_a_pause_may_leave_it() -> None:
    with ExitStack() as pauses:
        pauses.enter_context(gc_pause.kept())

        def left() -> bool:
            pauses.close()
            with gc_pause.kept():
                paused = not gc.isenabled()
            return paused and gc.isenabled()

        assert in_child(left)
        assert not gc.isenabled()
    assert gc.isenabled()
