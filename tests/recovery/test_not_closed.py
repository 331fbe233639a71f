"""A Checkpointer that nobody has closed, and another one of the same root in the same process: in a notebook, or where
a program trains twice."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers.inside import arena_of, has_said, session_of, snapshots_of, writer_of
from helpers.interrupted import interrupted_at
from helpers.one_job import WAIT_S
from helpers.registry import forget_session, session_at
from helpers.writers import stop, until

import ckptlib
from ckptlib.errors import Superseded, WaitTimeout
from ckptlib.staging import stager
from ckptlib.staging.arena import OPEN


class _Resume(logging.Handler):
    """Lets a stopped writer go on when somebody waits for it."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "waits for it" in record.getMessage() or "waiting for the writers" in record.getMessage():
            self.told.append(record.getMessage())
            os.kill(self._pid, signal.SIGCONT)


@contextmanager
def stopped_until_waited_for(pid: int) -> Iterator[list[str]]:
    """Gives what was said to whoever waited."""
    resume, logger = _Resume(pid), logging.getLogger("ckptlib")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(resume)
    stop(pid)
    try:
        yield resume.told
    finally:
        logger.removeHandler(resume)
        logger.setLevel(before)
        os.kill(pid, signal.SIGCONT)  # it is a child that nobody has waited for, so the number is still its own


def a_state() -> dict[str, object]:
    return {"w": torch.zeros(1000)}


def begun(root: Path) -> ckptlib.Checkpointer:
    """A job that has committed step 1."""
    first = ckptlib.Checkpointer(root, {"w": torch.ones(1000)}, every=10**6)
    assert first.restore().step == 0
    first.save(1).wait_committed(WAIT_S)
    return first


def settling(ckpt: ckptlib.Checkpointer) -> bool:
    session_of(ckpt).outcomes.poll()
    return snapshots_of(ckpt).settling


def restored(root: Path) -> tuple[int, float]:
    """By another job of this process; and that it saves on."""
    state = a_state()
    with ckptlib.Checkpointer(root, state, every=10**6) as second:
        step = second.restore().step
        second.save(step + 1).wait_committed(WAIT_S)
    return step, float(state["w"].sum())  # type: ignore[attr-defined]


def test_the_next_one_waits_for_what_the_open_one_still_saves(tmp_path: Path) -> None:
    first = begun(tmp_path)
    try:
        with stopped_until_waited_for(writer_of(first).pid) as told:
            first.save(2)
            assert restored(tmp_path) == (2, 1000.0)
        (text,) = told
        assert "still writes step 2" in text
        assert "`close`" in text
        with pytest.raises(Superseded):
            first.save(10).wait_committed(WAIT_S)
    finally:
        with pytest.raises(Superseded):
            first.close()


def test_the_next_one_waits_for_one_that_was_dropped(tmp_path: Path) -> None:
    """As where a cell of a notebook runs again: no name is left of the first one, nor of its slots and locks."""
    before, slots = set(OPEN), Path("/dev/shm")
    first = begun(tmp_path)
    session, pid = weakref.ref(session_of(first)), writer_of(first).pid
    names = [slot.path.name for slot in arena_of(first).slots]
    with stopped_until_waited_for(pid) as told:
        first.save(2).wait_staged(WAIT_S)
        del first
        for _ in range(3):
            gc.collect()
        assert session() is None
        assert restored(tmp_path) == (2, 1000.0)
        assert told
    assert before == OPEN
    assert not [name for name in names if (slots / name).exists()], "its writer removes them"


def test_the_next_one_waits_for_save_async(tmp_path: Path) -> None:
    ckptlib.save(tmp_path, {"w": torch.zeros(1000)}, 1)
    with stopped_until_waited_for(session_at(tmp_path).writer.pid) as told:
        ckptlib.save_async(tmp_path, {"w": torch.ones(1000)}, 2)
        assert restored(tmp_path) == (2, 1000.0)
    assert told
    forget_session(tmp_path)


def test_a_save_that_does_not_end_is_waited_for_no_longer_than_any_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy hangs, as where the file system of the slots does. A restore that went on would take an older step."""
    go_on, seal = threading.Event(), stager._seal

    def hang(staging: stager.Staging, before: list[str] | None) -> list[str]:
        assert go_on.wait(WAIT_S)
        return seal(staging, before)

    first = ckptlib.Checkpointer(tmp_path, {"w": torch.ones(1000)}, every=10**6, save_deadline=timedelta(seconds=2))
    monkeypatch.setattr(stager, "_seal", hang)
    first.save(1)
    state = a_state()
    with ckptlib.Checkpointer(tmp_path, state, every=10**6) as second:
        with pytest.raises(WaitTimeout, match=r"still writes step 1, which has not ended within 3 s: .*Nothing was"):
            second.restore()
        assert not state["w"].any()  # type: ignore[attr-defined]
    go_on.set()
    session_of(first).close(timedelta(0), clean=False)


@pytest.mark.parametrize("place", ["Stager.begin", "Stager.copy", "TrainingSteps._warn_of_metrics"])
def test_the_next_one_waits_for_no_save_whose_begin_was_interrupted(tmp_path: Path, place: str) -> None:
    """As by Ctrl-C in a notebook, whose traceback keeps the first one. No such save ever ends by itself."""
    first = begun(tmp_path)
    with interrupted_at(place):
        first.save(2)
    assert restored(tmp_path) == (1, 1000.0)
    session_of(first).close(timedelta(0), clean=False)


def test_what_an_open_one_has_in_memory_only_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    peers = ckptlib.Peers(copies=0)
    first = ckptlib.Checkpointer(tmp_path, {"w": torch.ones(1000)}, every=10**6, peers=peers)
    first.save(1)
    until(lambda: has_said(first, "committed"))
    with ckptlib.Checkpointer(tmp_path, a_state(), every=10**6, peers=peers) as second:
        assert second.restore().step == 1
        assert second.pending is None, "what is kept in memory again is no save"
    assert "in memory only" not in caplog.text, "the store has it"
    assert "waits for it" not in caplog.text, "nothing is under way"
    first.after_step(2)
    first.after_step(3)
    until(lambda: not settling(first))
    with ckptlib.Checkpointer(tmp_path, a_state(), every=10**6, peers=peers) as second:
        assert second.restore().step == 1
    assert "has step 3 in memory only" in caplog.text
    first.close()
