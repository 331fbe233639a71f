"""The example of torchft: both groups are killed and started again; and only the one that saves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import held
from helpers.same import same

import ckptlib

coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 40


@pytest.fixture
def lighthouse() -> Iterator[dict[str, str]]:
    server = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    yield {"TORCHFT_LIGHTHOUSE": "http://127.0.0.1:" + server.address().rsplit(":", 1)[1]}
    server.shutdown()


def start(directory: Path, name: str, groups: tuple[int, ...], held_at: int, then: str, **variables: str) -> held.Job:
    """Each is one rank."""
    out = directory / name
    out.mkdir(exist_ok=True)
    arguments = (held_at, out / "ckptlib", then, out, STEPS, "--group")
    return held.start(directory, [held.held("torchft_train.py", *arguments, group) for group in groups], **variables)


def finals(out: Path) -> dict[int, dict[str, torch.Tensor]]:
    return {group: dict(torch.load(out / f"final-{group}.pt", weights_only=True)) for group in (0, 1)}


def steps(out: Path) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(out / "ckptlib")]


def assert_saved(out: Path) -> None:
    """Its last step is in the root, with the weights that all groups ended with."""
    assert steps(out)[-1] == STEPS
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    ckptlib.load(out / "ckptlib", {"model": model}, only="model")
    assert all(same(dict(model.state_dict()), found) for found in finals(out).values())


def begun(told: str) -> int:
    (found,) = re.findall(r"from step (\d+)", told)
    return int(found)


def test_both_are_killed_and_started_again(tmp_path: Path, lighthouse: dict[str, str]) -> None:
    assert begun(start(tmp_path, "whole", (0, 1), 0, "on", **lighthouse).end()) == 0
    start(tmp_path, "parted", (0, 1), 27, "killed", **lighthouse).kill(2)
    assert not [*(tmp_path / "parted").glob("final-*")]
    told = start(tmp_path, "parted", (0, 1), 0, "on", **lighthouse).end()
    assert 0 < begun(told) <= 27
    assert same(finals(tmp_path / "whole"), finals(tmp_path / "parted"))
    for name in ("whole", "parted"):
        assert_saved(tmp_path / name)


def test_the_group_that_saves_is_killed_alone(tmp_path: Path, lighthouse: dict[str, str]) -> None:
    """The other one waits for it, and gives it its live weights: these are newer than the newest step of the root."""
    start(tmp_path, "whole", (0, 1), 0, "on", **lighthouse).end()
    other = start(tmp_path, "parted", (1,), 0, "on", **lighthouse)
    start(tmp_path, "parted", (0,), 27, "killed", **lighthouse).kill(1)
    assert other.processes[0].poll() is None
    told = start(tmp_path, "parted", (0,), 0, "on", **lighthouse).end()
    other.end()
    assert 0 < begun(told) <= 25
    assert int(re.findall(r"made (\d+) steps", told)[0]) == STEPS - 27  # none was made twice
    assert same(finals(tmp_path / "whole"), finals(tmp_path / "parted"))
    assert_saved(tmp_path / "parted")


def test_the_group_that_saves_is_told_to_stop(tmp_path: Path, lighthouse: dict[str, str]) -> None:
    """Held in step 27, it goes on at the signal, tells of it behind that step, and saves the next one."""
    saves = start(tmp_path, "told", (0,), 27, "killed", **lighthouse)
    other = start(tmp_path, "told", (1,), 0, "on", **lighthouse)
    saves.await_held(1)
    saves.processes[0].terminate()
    assert saves.processes[0].wait(100) == 75, saves.told()
    other.processes[0].kill()
    other.processes[0].wait(100)
    assert steps(tmp_path / "told")[-1] == 28
    assert begun(start(tmp_path, "told", (0, 1), 0, "on", **lighthouse).end()) == 28
    assert_saved(tmp_path / "told")
