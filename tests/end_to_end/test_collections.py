"""The garbage collector does not run in the middle of a save or of a small load, where training waits for it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch
from helpers.one_job import Job

import ckptlib


@pytest.fixture
def eager() -> Iterator[None]:
    """A collection after every few new objects."""
    before = gc.get_threshold()
    gc.set_threshold(5, 1, 1)
    yield
    gc.set_threshold(*before)


@pytest.fixture
def callers(eager: None) -> Iterator[set[str]]:
    """Names of all functions in which something was collected."""
    found: set[str] = set()

    def note(phase: str, info: dict[str, int]) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            found.add(frame.f_code.co_name)
            frame = frame.f_back

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


def test_no_collection_within_a_save(tmp_path: Path, callers: set[str]) -> None:
    job = Job(tmp_path / "root")
    with job.checkpointer() as ckpt:
        for step in range(1, 4):
            job.body()
            ckpt.save(step).wait_committed()
    assert "wait_committed" in callers, "collections go on"
    assert not callers & {"_save_step", "flatten"}
    assert gc.isenabled()


def test_nor_within_a_small_load_and_what_is_noted_of_it(tmp_path: Path, callers: set[str]) -> None:
    state = {f"t{i}": torch.full((4,), float(i)) for i in range(200)}
    ckptlib.save(tmp_path / "root", state, 1)
    callers.clear()
    ckptlib.load(tmp_path / "root", {name: torch.zeros(4) for name in state})
    assert "load" in callers, "collections go on"
    assert not callers & {"_load_step", "_tensors_of", "_local"}
    assert gc.isenabled()
