"""`ckptlib.dcp` in real jobs, those of examples/dcp_train.py: killed and resumed, and resharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import fork_ranks, forked
from places import WORKERS


def train(directory: Path, ranks: int, steps: int) -> dict[str, Any]:
    """The full state at the end."""
    directory.mkdir(exist_ok=True)
    out = directory / "out.pt"
    fork_ranks("dcp_train.py", ranks, directory, steps, -1, out, timeout_s=100)
    found: dict[str, Any] = torch.load(out, weights_only=True)
    return found


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items()}
    return [bits(entry) for entry in value] if isinstance(value, list | tuple) else value


@pytest.mark.timeout(300)
def test_killed_resumed_and_resharded(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 2, 10)
    killed = tmp_path / "killed"
    killed.mkdir()
    codes, output = forked(WORKERS / "dcp_train.py", 2, killed, 10, 7, killed / "out.pt", timeout_s=100)
    assert codes[1] == -9, output
    resumed = train(killed, 2, 10)
    assert resumed.pop("start") in (4, 6), "the save of step 6 may have been in flight"
    assert whole.pop("start") == 0
    assert bits(resumed) == bits(whole)

    for ranks in (1, 3):  # from two: nothing is trained, so the state is the saved one
        again = train(killed, ranks, 10)
        assert again.pop("start") == 10
        assert bits(again) == bits(whole)


@pytest.mark.timeout(200)
def test_copies_beside_the_training(tmp_path: Path) -> None:
    """`async_save(overlap=)` on ranks that differ: one writes past its fence, and copies at once from then on."""
    fork_ranks("dcp_overlapped.py", 2, tmp_path, timeout_s=150)
