"""Trainings with transformers' Trainer whose checkpoints are ckptlib's: they resume in mid-epoch, and end with the bits
of a run with Trainer's own files that nobody disturbed.

Five updates of two batches are an epoch, and checkpoints come every third step: see workers/hf_job.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_job
import pytest
import torch
from helpers.registry import close_sessions
from launch import environment, forked
from places import ROOT, WORKERS

import ckptlib
from ckptlib.adapters.step_folders import POINTER

STEPS = 14
KILLED_AT = 11


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of a run that nobody disturbed, with Trainer's own files."""
    return here(tmp_path_factory.mktemp("whole") / "run", whose="theirs")


def here(directory: Path, steps: int = STEPS, at: int = -1, whose: str = "ours", **asked: Any) -> dict[str, Any]:
    """In this process."""
    out = directory.with_suffix(".pt")
    state = torch.get_rng_state(), torch.get_num_threads()
    try:
        hf_job.main(directory, steps, at, out, whose, asked)
    finally:
        close_sessions()
        torch.set_rng_state(state[0])
        torch.set_num_threads(state[1])
    return torch.load(out, weights_only=True)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


def assert_same_end(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["step"] == b["step"] == STEPS
    assert same(a["model"], b["model"])
    assert same(a["optim"], b["optim"])


def checkpoints(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != "ckptlib")


def steps_of(directory: Path) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(directory / "ckptlib")]


@pytest.mark.timeout(300)
def test_killed_and_resumed_in_mid_epoch(tmp_path: Path, whole: dict[str, Any]) -> None:
    directory, out = tmp_path / "run", tmp_path / "run.pt"
    command = [sys.executable, WORKERS / "hf_job.py", directory, STEPS, KILLED_AT, out, "ours"]
    variables = {**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), environment()["PYTHONPATH"]])}
    done = subprocess.run([*map(str, command)], env=variables, capture_output=True, text=True, timeout=250)
    assert done.returncode == -9, done.stdout + done.stderr
    assert not out.exists()
    assert_same_end(here(directory), whole)
    assert checkpoints(directory) == ["checkpoint-12", "checkpoint-14"]  # save_total_limit=2
    assert steps_of(directory) == [12, 14]
    for name in checkpoints(directory):
        files = {path.name for path in (directory / name).iterdir()}
        assert files == {"trainer_state.json", POINTER, "config.json"}
        state = json.loads((directory / name / "trainer_state.json").read_text())
        assert f"checkpoint-{state['global_step']}" == name


@pytest.mark.timeout(300)
def test_two_ranks_killed_and_resumed(tmp_path: Path) -> None:
    """Each has its own random state, and BatchNorm's of its own batches."""
    ends = []
    for name, whose, runs in (("theirs", "theirs", [-1]), ("ours", "ours", [KILLED_AT, -1])):
        directory, out = tmp_path / name, tmp_path / f"{name}.pt"
        for at in runs:
            codes, output = forked(WORKERS / "hf_job.py", 2, directory, STEPS, at, out, whose, timeout_s=250)
            assert set(codes) == {0} if at < 0 else -9 in codes, output[-20000:]
        ends.append(torch.load(out, weights_only=True))
    assert_same_end(*ends)
    assert steps_of(tmp_path / "ours") == [12, 14]


def test_told_to_stop(tmp_path: Path, whole: dict[str, Any]) -> None:
    """The state is saved at once, and train() ends with the status that says so."""
    with pytest.raises(ckptlib.Preempted):
        here(tmp_path / "run", at=7, **{"at": "term"})
    assert checkpoints(tmp_path / "run") == ["checkpoint-6", "checkpoint-8"]
    assert_same_end(here(tmp_path / "run"), whole)


def test_an_error_in_the_training(tmp_path: Path, whole: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="as asked"):
        here(tmp_path / "run", at=8, **{"at": "raise"})
    assert_same_end(here(tmp_path / "run", resume=True), whole)
    assert steps_of(tmp_path / "run") == [12, 14]


def test_a_damaged_checkpoint_is_skipped(
    tmp_path: Path, whole: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    here(tmp_path / "run", steps=10, max_grad_norm=1.0, lr_scheduler_kwargs={}, save_total_limit=None)
    assert checkpoints(tmp_path / "run") == ["checkpoint-10", "checkpoint-3", "checkpoint-6", "checkpoint-9"]
    root = tmp_path / "run" / "ckptlib"
    for pack in root.glob("packs/*"):
        data = bytearray(pack.read_bytes())
        data[-1] ^= 1
        pack.write_bytes(data)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(ckptlib.CorruptData):
        here(tmp_path / "run", resume=True)
    assert "checkpoint-6" in caplog.text
    assert {path: path.read_bytes() for path in before} == before
