"""A Checkpointer whose writer is slow, and whose old steps have to go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from helpers.inside import arena_of, num_saves, settle, snapshots_of, writer_of
from helpers.one_job import WAIT_S, Job, catalog, slots, step_once, steps
from helpers.stage import wait_grown
from support import age, all_keys, keys_of

import ckptlib
from ckptlib.stores.local import LocalStore


class At:
    """Due at certain steps."""

    def __init__(self, *steps: int) -> None:
        self._steps = steps

    def due(self, step: int) -> bool:
        return step in self._steps


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing until the body is done."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_save_that_finds_no_slot_is_taken_later(job: Job) -> None:
    """A writer that is slower than the saves costs saves, never a wait, and never what was saved."""
    expected = {}
    with job.checkpointer(every=At(3, 6, 9)) as ckpt:
        with stopped(writer_of(ckpt).pid):
            for step in range(1, 12):
                job.body()
                expected[step] = job.bits()
                ckpt.after_step(step)
                if ckpt.pending is not None:
                    ckpt.pending.wait_staged(WAIT_S)
            assert ckpt.pending.step == 6, "both slots are full"
        ckpt.pending.wait_committed(WAIT_S)
        for step in (12, 13, 14):
            job.body()
            expected[step] = job.bits()
            ckpt.after_step(step)
    assert steps(job.root) == [3, 6, 13]
    for step in steps(job.root):
        ckptlib.load(job.root, job.state, step=step)
        assert job.bits() == expected[step]


def test_memory_is_kept_up_to_date_while_the_store_hangs(job: Job) -> None:
    """Saves do not queue up until they have all slots: one that is due waits until the one before is written."""
    with job.checkpointer(every=At(2, 4, 6, 8), peers=ckptlib.Peers(copies=0)) as ckpt:
        job.body()
        ckpt.after_step(1)
        settle(ckpt, WAIT_S)  # the record of the run is in the store
        with stopped(writer_of(ckpt).pid):
            for step in range(2, 20):
                job.body()
                ckpt.after_step(step)
                settle(ckpt, WAIT_S)
            assert ckpt.coverage is not None
            assert ckpt.coverage.step is not None
            assert ckpt.coverage.step >= 17
            assert ckpt.pending is not None
            assert ckpt.pending.step == 2
        settle(ckpt, WAIT_S, persisted=True)
        for step in (20, 21):
            job.body()
            ckpt.after_step(step)
        assert ckpt.pending.step == 21, "the save that was due is taken as soon as the ranks have agreed"
    assert steps(job.root) == [2, 21]


def test_what_would_be_lost_counts_to_the_step_of_the_training(job: Job) -> None:
    """Whether or not a snapshot could be begun since the one that all ranks hold."""
    with job.checkpointer(every=At(), peers=ckptlib.Peers(copies=0, every=4)) as ckpt:
        lags = []
        for step in range(101, 112):  # a job that has been restored
            job.body()
            ckpt.after_step(step)
            settle(ckpt, WAIT_S)
            assert ckpt.coverage is not None
            lags.append((step, step - (ckpt.coverage.step or 100) - ckpt.coverage.lag))
        assert ckpt.coverage.step == 108
        assert [off for _, off in lags] == [0] * 11


def test_a_save_that_was_asked_for_takes_the_last_slot(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """After the ranks have said that there is one for the save that is due next: that one is taken later."""
    with job.checkpointer(every=At(3)) as ckpt:
        with stopped(writer_of(ckpt).pid):
            for step in (1, 2):
                job.body()
                ckpt.after_step(step)
                ckpt.save(step).wait_staged(WAIT_S)
            job.body()
            ckpt.after_step(3)
            assert ckpt.pending is not None
            assert ckpt.pending.step == 2, "both slots are full"
        ckpt.pending.wait_committed(WAIT_S)
        for step in (4, 5, 6):
            job.body()
            ckpt.after_step(step)
    assert steps(job.root)[:2] == [1, 2]
    assert len(steps(job.root)) == 3
    assert "could not be saved" not in caplog.text


def test_a_state_that_grows_at_every_step(job: Job) -> None:
    """A rank without others does not wait for the next step to save it."""
    with job.checkpointer(every=1) as ckpt:
        for step in range(1, 5):
            job.state["seen"] = torch.arange(1000.0 * step)
            ckpt.after_step(step)
            ckpt.save(step).wait_committed(WAIT_S)
    assert steps(job.root) == [1, 2, 3, 4]


def test_snapshots_in_memory_go_on_at_every_step_while_one_is_written(job: Job) -> None:
    """A writer that takes longer than a step gets a slot of its own: no more than two steps are ever at stake."""
    with job.checkpointer(every=At(2), peers=ckptlib.Peers(copies=0)) as ckpt:
        begun = []
        job.body()
        ckpt.after_step(1)
        settle(ckpt, WAIT_S)  # the writer has put the record, without which no snapshot counts
        with stopped(writer_of(ckpt).pid):
            for step in range(2, 21):
                job.body()
                num_before = num_saves(ckpt)
                ckpt.after_step(step)
                begun.append(num_saves(ckpt) - num_before)
                settle(ckpt, WAIT_S)
                wait_grown(arena_of(ckpt))
                assert ckpt.coverage is not None
                if step >= 11:
                    assert (snapshots_of(ckpt).own.newest, ckpt.coverage.lag <= 2) == (step, True)
        assert 0 in begun[2:8], "three slots are too few"
        assert begun[9:] == [1] * 10
    assert slots(job.root.parent) == []


# -- retention in a live job


def test_old_steps_go_while_the_job_lives(job: Job) -> None:
    keep = ckptlib.Keep(last=2, every=6, grace=timedelta(seconds=400))
    options: dict[str, object] = {"every": 3, "keep": keep, "save_deadline": timedelta(seconds=150)}
    expected = {}
    with job.checkpointer(**options) as ckpt:
        for step in range(1, 16):
            job.body()
            expected[step] = job.bits()
            step_once(ckpt, step)
    assert steps(job.root) == [6, 12, 15]
    store = LocalStore(str(job.root))
    dropped = {key.split("/")[1].split("-")[0].lstrip("0") for key in all_keys(store) if key.startswith("trash/")}
    assert {"3", "9"} <= dropped
    age(store, 600)
    with job.checkpointer(**options) as ckpt:
        assert ckpt.restore().step == 15
        for step in range(16, 19):
            job.body()
            expected[step] = job.bits()
            step_once(ckpt, step)
    assert steps(job.root) == [6, 12, 15, 18]
    there = {key for save in catalog(job.root).visible() for key in keys_of(store, save)}
    bytes_left = {key for key in all_keys(store) if key.startswith(("packs/", "parts/"))}
    assert bytes_left == {key for key in there if key.startswith(("packs/", "parts/"))}, "what was dropped is deleted"
    for step in steps(job.root):
        ckptlib.load(job.root, job.state, step=step)
        assert job.bits() == expected[step]


def test_a_grace_period_that_is_too_short_is_refused(job: Job) -> None:
    with pytest.raises(ValueError, match="save deadline"):
        job.checkpointer(keep=ckptlib.Keep(grace=timedelta(seconds=30)), save_deadline=timedelta(seconds=20))
