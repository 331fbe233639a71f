"""Lists of plain values come back as long as they were saved, whatever length they have when they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.registry import close_sessions
from onerank import Root

import ckptlib

VALUES = [0.5, "two", None, 3, (4, 5)]


@pytest.fixture(autouse=True)
def _close(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "root" not in request.fixturenames:
        close_sessions()


@pytest.mark.parametrize("before", [0, 2, 5, 9])
def test_as_long_as_saved(root: Root, before: int) -> None:
    saved = {"losses": [*VALUES[:4]], "deep": {"a": [["x"], ["y"]]}, "w": torch.ones(1)}
    losses: list[object] = ["old"] * before
    state = {"losses": losses, "deep": {"a": [["x"], ["old"]]}, "w": torch.zeros(1)}
    report = root.move(saved, state)
    assert state["losses"] is losses, "in place, as other names of it see the same"
    assert losses == VALUES[:4]
    assert state["deep"] == {"a": [["x"], ["y"]]}
    assert (report.missing, report.unexpected) == ((), ())
    assert report.values["losses"] == VALUES[:4]


@pytest.mark.parametrize("now", [{}, {"losses": None}, {"losses": [[1.0], [2.0]]}, {"losses": {"0": 9}}])
def test_a_list_whose_place_is_empty_or_other(root: Root, now: dict[str, Any]) -> None:
    """Such as `history.setdefault("losses", []).append(loss)`, with a history that is empty when it is loaded."""
    saved = {"history": {"losses": [0.5, 0.25]}, "w": torch.ones(1)}
    report = root.move(saved, {"history": now, "w": torch.zeros(1)})
    assert now == {"losses": [0.5, 0.25]}
    assert (report.missing, report.unexpected) == ((), ())


def test_a_job_that_is_restarted_has_all_of_its_losses(tmp_path: Path) -> None:
    for total in (3, 7):
        losses: list[float] = []
        with ckptlib.Checkpointer(tmp_path, {"losses": losses, "w": torch.ones(1)}, every=2) as ckpt:
            for step in ckpt.loop(ckpt.restore().step, total):
                losses.append(step / 2)
    assert losses == [step / 2 for step in range(7)]


def test_what_stays_as_it_was(root: Root) -> None:
    """No plain values here or there, or not asked for."""
    saved = {"mixed": [1, torch.ones(1)], "left": [1, 2, 3], "other": [1, 2]}
    root.save(saved)
    state: dict[str, Any] = {"mixed": [0], "left": [0], "other": [0, 0, 0], "absent": [7, 8]}
    root.load(state, strict=False, only=["mixed", "other", "absent"])
    assert state == {"mixed": [1], "left": [0], "other": [1, 2], "absent": [7, 8]}


def test_an_entry_of_a_list_has_no_name(root: Root) -> None:
    root.save({"other": [1, 2], "w": torch.ones(1)})
    state: dict[str, Any] = {"other": [0, 0], "w": torch.zeros(1)}
    with pytest.raises(ckptlib.StateMismatch, match="other/1"):
        root.load(state, only="other/1")
    assert state == {"other": [0, 0], "w": torch.zeros(1)}


def test_renamed(root: Root) -> None:
    root.save({"old": {"losses": [1, 2, 3]}, "w": torch.ones(1)})
    losses: list[int] = []
    root.load({"new": {"losses": losses}, "w": torch.zeros(1)}, map={"new": "old"})
    assert losses == [1, 2, 3]


def test_nothing_is_changed_where_the_load_is_refused(root: Root) -> None:
    root.save({"losses": [1, 2, 3], "w": torch.ones(1)})
    losses = [9]
    with pytest.raises(ckptlib.StateMismatch):
        root.load({"losses": losses, "w": torch.zeros(2)})
    assert losses == [9]
