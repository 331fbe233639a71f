"""A process that saves to one root after the other keeps a writer and slots for the last few of them only."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from helpers.registry import close_sessions, writers
from helpers.writers import until
from launch import fork_ranks

import ckptlib
import ckptlib.dcp as dcp
from ckptlib.saving import registry
from ckptlib.testing import write_plan
from ckptlib.writer import client

STATE = {"w": torch.arange(4.0)}

MAX_OPEN = 2
"""Each more is a writer's start more."""


@pytest.fixture(autouse=True)
def _closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "MAX_OPEN", MAX_OPEN)
    yield
    close_sessions()


def steps(url: object) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(str(url))]


def test_as_in_the_tutorial_of_dcp(tmp_path: Path) -> None:
    """No step is told there, so each is a root of its own."""
    before = writers()
    saved = None
    for step in range(MAX_OPEN + 3):
        if saved is not None:
            saved.result()
        saved = dcp.async_save({"w": torch.full((4,), float(step))}, checkpoint_id=tmp_path / f"checkpoint_step{step}")
        assert len(writers() - before) <= MAX_OPEN
    assert saved is not None
    saved.result()
    for step in range(MAX_OPEN + 3):
        loaded = {"w": torch.zeros(4)}
        dcp.load(loaded, checkpoint_id=tmp_path / f"checkpoint_step{step}")
        assert loaded["w"].eq(step).all()


def test_roots_that_are_used_in_turns_stay_open(tmp_path: Path) -> None:
    for step in range(1, 4):
        for n in range(MAX_OPEN):
            ckptlib.save(tmp_path / str(n), STATE, step)
    for n in range(MAX_OPEN):
        assert len([*(tmp_path / str(n) / "generations").glob("*.json")]) == 1


def test_who_opens_another_root_does_not_wait_until_old_steps_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "SWEEPS_S", 0.1)
    plan = tmp_path / "plan"
    write_plan(plan, [{"op": "delete", "key": "^steps/", "action": "hold"}])
    for step in (1, 2):
        ckptlib.save(f"fault+file://{tmp_path}/first?plan={plan}", STATE, step, keep=ckptlib.Keep(last=1))
    for n in range(MAX_OPEN):
        ckptlib.save(tmp_path / str(n), STATE, 1)
    assert "still removes old steps, and goes on with that alone" in caplog.text
    write_plan(plan, [])
    until(lambda: steps(tmp_path / "first") == [2])


def test_what_a_save_was_waited_for_is_told_where_it_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As at the end of a program: two waits share that time, and the message had what was left for the second."""
    monkeypatch.setattr(registry, "SAVE_DEADLINE", timedelta(seconds=1))
    plan = tmp_path / "plan"
    write_plan(plan, [{"op": "commit", "key": "^packs/", "action": "hold"}])
    ckptlib.save_async(f"fault+file://{tmp_path}/first?plan={plan}", STATE, 1)
    close_sessions()
    assert "did not finish within 1 s; it goes on alone" in caplog.text
    write_plan(plan, [])
    until(lambda: steps(tmp_path / "first") == [1])


def test_one_that_was_closed_is_gone_on_with(tmp_path: Path) -> None:
    """Its place is known, also where the state does not tell what was loaded into it: that is no reason to go back."""
    ckptlib.save(tmp_path / "first", {"n": 1}, 1)
    ckptlib.save(tmp_path / "first", {"n": 2}, 2)
    for n in range(MAX_OPEN):
        ckptlib.save(tmp_path / str(n), STATE, 1)
    ckptlib.load(tmp_path / "first", {"n": 0}, step=1)
    ckptlib.save(tmp_path / "first", {"n": 3}, 3)
    assert steps(tmp_path / "first") == [1, 2, 3]


@pytest.mark.parametrize("step", [1, 2])
def test_one_that_was_closed_is_not_gone_back_in_by_a_lower_step(tmp_path: Path, step: int) -> None:
    """It would begin a new generation, in which the steps from there on are listed no more."""
    for earlier in (1, 2):
        ckptlib.save(tmp_path / "first", STATE, earlier)
    for n in range(MAX_OPEN):
        ckptlib.save(tmp_path / str(n), STATE, 1)
    with pytest.raises(ValueError, match=f"step {step} does not come after step 2"):
        ckptlib.save(tmp_path / "first", STATE, step)
    assert steps(tmp_path / "first") == [1, 2]
    ckptlib.save(tmp_path / "first", STATE, 3)
    assert steps(tmp_path / "first") == [1, 2, 3]


def test_who_goes_back_in_one_that_was_closed_goes_back(tmp_path: Path) -> None:
    """By a load, and by DCP's words, which take a step that was passed for one to go back to."""
    loaded = {"w": torch.zeros(4)}
    for step in (1, 2, 3):
        ckptlib.save(tmp_path / "first", loaded, step)
        dcp.save(STATE, checkpoint_id=tmp_path / "second" / f"step-{step}")
    for n in range(MAX_OPEN):
        ckptlib.save(tmp_path / str(n), STATE, 1)
    ckptlib.load(tmp_path / "first", loaded, step=1)
    ckptlib.save(tmp_path / "first", loaded, 2)
    assert steps(tmp_path / "first") == [1, 2]
    dcp.save(STATE, checkpoint_id=tmp_path / "second" / "step-2")
    assert steps(tmp_path / "second" / "step") == [1, 2]


def test_what_became_of_a_save_is_told_on_all_ranks(tmp_path: Path) -> None:
    output = fork_ranks("many_roots.py", 2, tmp_path, timeout_s=120)
    assert output.count("all told") == 2, output
