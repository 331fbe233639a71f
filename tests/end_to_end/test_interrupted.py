"""Ctrl-C while a save begins: whoever catches it trains on, saves on and closes, and no half of a snapshot is saved."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import FrameType

import pytest
from helpers.one_job import WAIT_S, Job, slots, steps

import ckptlib


@contextmanager
def interrupted_at(function: str) -> Iterator[None]:
    """As by Ctrl-C at the moment when this function of ckptlib is first called in here."""

    def trace(frame: FrameType, event: str, arg: object) -> None:
        if f"{type(frame.f_locals.get('self')).__name__}.{frame.f_code.co_name}" == function:
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(before)


PLACES = {
    "Stager.begin": "the writer expects a snapshot that nobody takes",
    "Fence.guard": "nothing keeps the optimizer from what is to be copied",
    "Steps._warn_of_metrics": "the fence waits for a copy that nobody lets go",
}


def second_step_interrupted(job: Job, ckpt: ckptlib.Checkpointer, place: str) -> None:
    """Behind a first one that is saved."""
    job.body()
    ckpt.after_step(1)
    assert ckpt.pending is not None
    ckpt.pending.wait_committed(WAIT_S)
    job.body()
    with interrupted_at(place):
        ckpt.after_step(2)


@pytest.mark.parametrize("place", PLACES)
def test_training_goes_on(job: Job, place: str) -> None:
    with job.checkpointer(every=1) as ckpt:
        second_step_interrupted(job, ckpt, place)
        for step in (3, 4):
            job.body()
            ckpt.after_step(step)
        ckpt.save(4).wait_committed(WAIT_S)
        told = job.bits()
        ckpt.close(timedelta(seconds=WAIT_S))
    assert {1, 4} <= {*steps(job.root)}
    assert (2 in steps(job.root)) <= (place == "Steps._warn_of_metrics")
    assert slots(job.root.parent) == []
    job.body()
    ckptlib.load(job.root, job.state)
    assert job.bits() == told


@pytest.mark.parametrize("place", PLACES)
def test_close_does_not_wait_for_what_never_began(job: Job, place: str) -> None:
    ckpt = job.checkpointer(every=1)
    second_step_interrupted(job, ckpt, place)
    with nullcontext() if place == "Stager.begin" else pytest.raises(ckptlib.SaveFailed, match="interrupted"):
        ckpt.close(timedelta(seconds=WAIT_S))
    assert steps(job.root) == [1]
    assert slots(job.root.parent) == []
