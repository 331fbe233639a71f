"""A restart goes on from what the start before has measured, if that was measured where it runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptlib
from ckptlib.format.documents import encode
from ckptlib.saving.recall import machine

STORE = {"step_s": 0.01, "each_step_s": 0.0, "save_s": 0.0987, "visible_s": 0.01, "persist_s": 0.01, "num_saves": 20}
"""At a budget of 30 %: 32.9 steps."""
FRESH = 20


def run(root: Path, num_steps: int, every: ckptlib.Overhead) -> list[int]:
    """The interval in force at each step but the first, where none is agreed upon yet."""
    state = {"w": torch.zeros(3)}
    found: list[int] = []
    with ckptlib.Checkpointer(root, state, every=every, arena=root.parent) as ckpt:
        start = ckpt.restore().step
        for step in ckpt.loop(start, start + num_steps):
            state["w"] += 1
            if step > start:
                assert ckpt.interval is not None
                found.append(ckpt.interval)
    return found


def newest(root: Path) -> Path:
    return max((root / "steps").glob("*.json"))


def record(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(newest(root).read_bytes())["body"]["account"].get("measured", {})
    return found


def rewrite(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """As another start had left it; digests and all."""
    body = json.loads(newest(root).read_bytes())["body"]
    body["account"]["measured"] = {"world_size": 1, "machine": machine(), "store": dict(STORE)}
    change(body["account"]["measured"])
    newest(root).write_bytes(encode("manifest", body))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With one step, of a start that has measured nothing."""
    run(tmp_path / "root", 3, ckptlib.Overhead(0.3))
    assert record(tmp_path / "root") == {}
    return tmp_path / "root"


def test_what_is_recorded(tmp_path: Path) -> None:
    """By the first save after one has been measured."""
    root, state = tmp_path / "root", {"w": torch.zeros(3)}
    with ckptlib.Checkpointer(root, state, every=ckptlib.Overhead(0.9), arena=tmp_path) as ckpt:
        account = ckpt._turns.tuning._kinds.store.account
        assert account is not None
        measured_at, step = None, 0
        while measured_at is None or ckpt.pending is measured_at:
            step += 1
            time.sleep(0.005)  # steps that take nothing come by the million
            ckpt.after_step(step)
            if measured_at is None and account.tuner.measured is not None:
                measured_at = ckpt.pending
        assert ckpt.pending is not None
        ckpt.pending.wait_committed(150)
    found = record(root)
    assert {*found} == {"world_size", "machine", "store"}
    assert (found["world_size"], found["machine"]) == (1, machine())
    assert {*found["store"]} == {*STORE}
    assert found["store"]["num_saves"] >= 2
    assert found["store"]["step_s"] > 0


def test_the_next_start_goes_on_from_it(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(root, lambda told: None)
    with caplog.at_level("INFO"):
        assert run(root, 10, ckptlib.Overhead(0.3)) == [33] * 9
    assert "on a save every 33 steps: as the start before has measured it, a save costs 0.0987 s" in caplog.text
    assert record(root)["store"] == STORE, "a start of few steps hands it on"


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told.update(world_size=2),
        lambda told: told.update(machine="another"),
        lambda told: told.update(store={**STORE, "save_s": "much"}),
        lambda told: told.update(store={**STORE, "step_s": 0}),
        lambda told: told.update(store=[1]),
        lambda told: told.clear(),
    ],
    ids=["ranks", "machine", "no number", "no time", "no record", "nothing"],
)
def test_what_does_not_hold_here_is_left_alone(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    rewrite(root, change)
    assert run(root, 5, ckptlib.Overhead(0.3)) == [FRESH] * 4


def test_a_budget_that_is_new_in_this_start(root: Path) -> None:
    rewrite(root, lambda told: None)
    assert run(root, 5, ckptlib.Overhead(0.1)) == [99] * 4
