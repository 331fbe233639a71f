"""The garbage collector does not run in the middle of a save, where training waits for it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from helpers.one_job import Job


@pytest.fixture
def eager() -> Iterator[None]:
    """A collection after every few new objects."""
    before = gc.get_threshold()
    gc.set_threshold(5, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("eager")
def test_no_collection_within_a_save(tmp_path: Path) -> None:
    job = Job(tmp_path / "root")
    callers: set[str] = set()

    def note(phase: str, info: dict[str, int]) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            callers.add(frame.f_code.co_name)
            frame = frame.f_back

    gc.callbacks.append(note)
    try:
        with job.checkpointer() as ckpt:
            for step in range(1, 4):
                job.body()
                ckpt.save(step).wait_committed()
    finally:
        gc.callbacks.remove(note)
    assert "wait_committed" in callers, "collections go on"
    assert not callers & {"_save_step", "flatten"}
    assert gc.isenabled()
