"""A writer that its job left behind before it had read its orders, or put its record, and the job that comes next."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.writers import alive, until
from workers import crash_jobs, crash_oracle, left_jobs

import ckptlib
from ckptlib.errors import Superseded
from ckptlib.recovery import filling, leftovers
from ckptlib.recovery.memory_source import InMemory
from ckptlib.slots import slot as slots
from ckptlib.slots.writer_lock import SUFFIX


def test_the_record_comes_after_the_next_job_has_begun(tmp_path: Path) -> None:
    """Its snapshot was in memory only, so nothing that it puts takes the root from the job that runs."""
    state = {"w": torch.ones(100)}
    ckptlib.save(tmp_path, state, 0)
    writer = None
    try:
        try:
            with ckptlib.Checkpointer(tmp_path, state, every=1, peers=ckptlib.Peers(copies=0)) as first:
                writer = first._session.writer.pid
                os.kill(writer, signal.SIGSTOP)
                first.after_step(1)
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        with ckptlib.Checkpointer(tmp_path, state, every=10**6, peers=ckptlib.Peers(copies=0)) as second:
            assert second._session.generation.number > first._session.generation.number
            os.kill(writer, signal.SIGCONT)
            until((tmp_path / first._session.generation.key).exists)
            second.save(10).wait_committed(60.0)
    finally:
        if writer is not None and alive(writer):
            os.kill(writer, signal.SIGKILL)


def test_the_record_comes_after_the_next_job_has_begun_though_no_slot_is_left(tmp_path: Path) -> None:
    """As where the job before had no room for one."""
    state, peers = {"w": torch.ones(100)}, ckptlib.Peers(copies=0)
    options: dict[str, Any] = {"every": 1, "peers": peers, "arena": tmp_path / "arena"}
    (tmp_path / "arena").mkdir()
    writer = None
    try:
        with suppress(KeyboardInterrupt), ckptlib.Checkpointer(tmp_path / "root", state, **options) as first:
            writer = first._session.writer.pid
            os.kill(writer, signal.SIGSTOP)
            first.after_step(1)
            raise KeyboardInterrupt
        for slot in (tmp_path / "arena").glob(f"*{slots.SUFFIX}"):
            slot.unlink()
        with ckptlib.Checkpointer(tmp_path / "root", state, **options) as second:
            assert second._session.generation.number > first._session.generation.number
            os.kill(writer, signal.SIGCONT)
            until((tmp_path / "root" / first._session.generation.key).exists)
            second.save(10).wait_committed(60.0)
    finally:
        if writer is not None and alive(writer):
            os.kill(writer, signal.SIGKILL)


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_a_job_that_another_one_was_ahead_of_ends_at_once(tmp_path: Path, kind: str) -> None:
    """Not at its first save to the store, which may be hours away: what it keeps on its hosts counts for nothing."""
    state = {"w": torch.ones(100)}
    for arena in ("mine", "theirs"):
        (tmp_path / arena).mkdir()
    options: dict[str, Any] = {"every": 10**6, "peers": ckptlib.Peers(copies=0, every=1)}
    if kind == "local":
        options = {"every": 1, "local": tmp_path / "disk", "drain": ckptlib.Steps(10**6)}

    def train() -> None:
        with ckptlib.Checkpointer(tmp_path / "root", state, arena=tmp_path / "mine", **options) as mine:
            with ckptlib.Checkpointer(tmp_path / "root", state, every=1, arena=tmp_path / "theirs") as theirs:
                theirs.after_step(1)
            for step in range(1, 10**4):
                mine.after_step(step)
                time.sleep(0.005)

    with pytest.raises(Superseded, match="has begun since this job opened the root"):
        train()
    assert [info.step for info in ckptlib.checkpoints(tmp_path / "root")] == [1]


class Left:
    """A root, and the writer of a job that was killed."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        self._directory = directory
        self.writer = 0

    def die_at(self, step: int, stopped: bool = True, **options: object) -> None:
        """See `die_early`."""
        (job,) = crash_jobs.start(left_jobs.die_early, self._directory, url=str(self.root), stopped=stopped, **options)
        assert job.join() == -signal.SIGKILL
        (told,) = job.told()
        assert told["step"] == step
        self.writer = told["writer"]

    def on_wait(self, act: Callable[[], None]) -> logging.Handler:
        """Acts as soon as a restart says that it waits."""

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                if "waiting for the writers" in record.getMessage():
                    act()

        return Handler()

    def locks(self) -> list[Path]:
        return [path for path in crash_oracle.slots_of(self.root) if path.suffix == SUFFIX]


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Left]:
    left = Left(tmp_path)
    yield left
    crash_jobs.end_all(left.root)


@pytest.fixture
def waiting(left: Left) -> Iterator[list[str]]:
    """As soon as a restart waits for it, the writer goes on. Gives a word for each time."""
    told: list[str] = []

    def go_on() -> None:
        told.append("waits")
        os.kill(left.writer, signal.SIGCONT)

    logger, handler = logging.getLogger(leftovers.__name__), left.on_wait(go_on)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield told
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("peers", "moves"),
    [(None, False), (ckptlib.Peers(copies=0), False), (None, True)],
    ids=["storage", "memory", "another arena"],
)
def test_a_restart_waits_for_orders_that_were_not_read(
    left: Left, waiting: list[str], tmp_path: Path, peers: ckptlib.Peers | None, moves: bool
) -> None:
    """Without peers the restart would have taken the slot away; with them it counts for nothing without the record."""
    left.die_at(1, peers=peers)
    state, arena = crash_jobs.State(crash_jobs.NUMEL), tmp_path if moves else None
    with ckptlib.Checkpointer(left.root, state.mapping, every=10**6, peers=peers, arena=arena) as ckpt:
        report = ckpt.restore()
        assert (waiting, report.step, report.in_memory) == (["waits"], 1, peers is not None)
        state.check(1)
        ckpt.save(2).wait_committed(60.0)
    until(lambda: not alive(left.writer))
    assert [step.number for step in crash_oracle.read_root(left.root)] == [1, 2]
    assert [info.step for info in ckptlib.checkpoints(left.root)] == [1, 2]
    assert crash_oracle.slots_of(left.root) == []


def test_what_is_newer_than_a_snapshot_in_memory_is_waited_for(left: Left, waiting: list[str]) -> None:
    """The record of its generation is not put yet, so the one before it is the newest that history knows of."""
    peers = ckptlib.Peers(copies=0)
    left.die_at(1, stopped=False, peers=peers)
    until(lambda: [step.number for step in crash_oracle.read_root(left.root)] == [1])
    left.die_at(2, peers=peers)
    assert [step.number for step in crash_oracle.read_root(left.root)] == [1]
    state = crash_jobs.State(crash_jobs.NUMEL)
    with ckptlib.Checkpointer(left.root, state.mapping, every=10**6, peers=peers) as ckpt:
        report = ckpt.restore()
        assert (waiting, report.step, report.in_memory) == (["waits"], 2, True)
        state.check(2)
    assert [info.step for info in ckptlib.checkpoints(left.root)] == [1, 2]


@pytest.mark.parametrize("tier", ["store", "local"])
def test_a_step_whose_memory_is_given_back_meanwhile_is_waited_for(
    left: Left, waiting: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """Its job had no peers, so each writer lets go of its slot as its own share is durable: rank 1's behind the
    restart's look at the memory, and rank 0's not before the restart waits for it."""
    local = {} if tier == "store" else {"local": str(tmp_path / "disk")}
    told = {"url": str(left.root), "drains": tier == "store", **local}
    jobs = crash_jobs.start(left_jobs.die_with_stopped_writers, tmp_path, 2, **told)
    left.writer, other = (job.wait_for("dies")["writer"] for job in jobs)
    assert {job.join() for job in jobs} == {-signal.SIGKILL}

    def open_late(*args: Any) -> InMemory:
        os.kill(other, signal.SIGCONT)
        until(lambda: not alive(other))
        return InMemory(*args)

    monkeypatch.setattr(filling, "InMemory", open_late)
    state = crash_jobs.State(crash_jobs.NUMEL)
    options: dict[str, Any] = {"every": 10**6, "peers": ckptlib.Peers(copies=0), **local}
    with ckptlib.Checkpointer(left.root, state.mapping, **options) as ckpt:
        report = ckpt.restore()
        assert (waiting, report.step, report.tier) == (["waits"], 2, tier)
        state.check(2)
    assert [info.step for info in ckptlib.checkpoints(left.root)] == [1, 2]


def test_the_wait_ends_and_says_whom_it_was_for(
    left: Left, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left.die_at(1)
    (lock,) = left.locks()
    monkeypatch.setattr(leftovers, "ORPHANS_TIMEOUT_S", 0.2)
    state = crash_jobs.State(crash_jobs.NUMEL)
    with ckptlib.Checkpointer(left.root, state.mapping, every=10**6) as ckpt:
        assert ckpt.restore().step == 0
        assert f"have not finished within 0 s what they write to {left.root.as_uri()}" in caplog.text, caplog.text
        assert str(lock) in caplog.text
        ckpt.save(5).wait_committed(60.0)
        os.kill(left.writer, signal.SIGCONT)
        until(lambda: not alive(left.writer))
    assert [info.step for info in ckptlib.checkpoints(left.root)] == [5]
    assert crash_oracle.slots_of(left.root) == []


def test_a_writer_that_is_killed_is_not_waited_for(left: Left, waiting: list[str]) -> None:
    left.die_at(1)
    os.kill(left.writer, signal.SIGKILL)
    until(lambda: not alive(left.writer))
    state = crash_jobs.State(crash_jobs.NUMEL)
    with ckptlib.Checkpointer(left.root, state.mapping, every=10**6) as ckpt:
        assert (ckpt.restore().step, waiting) == (0, [])
    assert crash_oracle.slots_of(left.root) == [], "its lock is nobody's"


def test_a_job_that_lives_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In another process, and in this one; its writer may have orders to read at any time."""
    caplog.set_level(logging.INFO, "ckptlib")
    root, gates = tmp_path / "root", tmp_path / "gates"
    gates.mkdir()
    (job,) = crash_jobs.start(crash_jobs.train_when_told, tmp_path, url=str(root), gates=str(gates))
    job.wait_for("waiting")
    (gates / "1").write_text("settle")
    job.wait_for("committed")
    state = crash_jobs.State(crash_jobs.NUMEL)
    try:
        with ckptlib.Checkpointer(root, state.mapping, every=10**6) as ckpt:
            assert ckpt.restore().step == 1
            with ckptlib.Checkpointer(root, state.mapping, every=10**6) as other:
                assert other.restore().step == 1
            assert "waiting for the writers" not in caplog.text
            (gates / "2").write_text("settle")
            job.wait_for("committed", 2)
        assert len([path for path in crash_oracle.slots_of(root) if path.suffix == SUFFIX]) == 1, "the live job's own"
        (gates / "3").write_text("end")
        assert job.join() == 0
        job.join_writers()
        assert crash_oracle.slots_of(root) == []
    finally:
        crash_jobs.end_all(root)


@pytest.mark.slow
def test_what_the_next_job_restores_from_memory_and_does_not_live_to_save_is_committed(tmp_path: Path) -> None:
    """A job that crashes again and again, until its hosts are given back. Its last snapshot was whole all the time."""
    root, peers = tmp_path / "root", ckptlib.Peers(copies=0, every=1, keep_for=timedelta(seconds=30))
    try:
        (first,) = crash_jobs.start(left_jobs.die_held, tmp_path, url=str(root), steps=3, peers=peers)
        assert first.join() == -signal.SIGKILL
        held = first.told()[-1]["held"]
        for _ in range(2):
            (second,) = crash_jobs.start(left_jobs.die_restored, tmp_path, url=str(root), peers=peers)
            assert second.join() == -signal.SIGKILL
            assert second.told()[-1]["recorded"]
            assert second.told()[-1]["step"] >= 3
        assert crash_oracle.read_root(root) == []
        first.join_writers()
        (step,) = crash_oracle.read_root(root)
        assert (step.generation, step.number >= held) == (1, True)
        state = crash_jobs.State(crash_jobs.NUMEL)
        with ckptlib.Checkpointer(root, state.mapping, every=10**6) as ckpt:
            assert ckpt.restore().step == step.number
            assert torch.equal(state.weights[0].detach(), crash_jobs.pattern(3, crash_jobs.NUMEL))
    finally:
        crash_jobs.end_all(root)
