"""The checkpoint manager for torchtitan, with torchtitan's containers: killed and resumed, and from its own files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import environment
from places import ROOT, WORKERS

import ckptlib

pytest.importorskip("torchtitan", reason="brings dozens of packages")

pytestmark = pytest.mark.timeout(600)


def train(
    folder: Path,
    out: Path,
    *,
    ranks: int = 2,
    steps: int = 14,
    killed_at: int = -1,
    whose: str = "ours",
    initial: str = "",
) -> tuple[dict[str, Any], str]:
    """Empty where it was killed; and what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    job = [WORKERS / "torchtitan_job.py", folder, steps, killed_at, out, whose, *([initial] if initial else [])]
    variables = {**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([*map(str, [*command, *job])], env=variables, capture_output=True, text=True, timeout=200)
    assert (done.returncode == 0) == (killed_at < 0), done.stdout + done.stderr
    return (torch.load(out, weights_only=True) if killed_at < 0 else {}), done.stdout


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert (first["step"], first["seen"]) == (second["step"], second["seen"])
    assert all(torch.equal(tensor, second["model"][name]) for name, tensor in first["model"].items())


def test_killed_and_resumed(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "whole", tmp_path / "whole.pt")
    train(tmp_path / "parted", tmp_path / "parted.pt", killed_at=11)
    parted, told = train(tmp_path / "parted", tmp_path / "parted.pt")
    assert "loaded True, step 9\n" in told
    assert_same(whole, parted)
    steps = [info.step for info in ckptlib.checkpoints(tmp_path / "parted" / "checkpoint")]
    assert len(steps) == 2  # keep_latest_k
    assert steps[-1] == 14


def test_one_rank_is_told_to_stop(tmp_path: Path) -> None:
    """All save the same step and end; the next start goes on from there, with the end of a run that was left alone."""
    whole, _ = train(tmp_path / "whole", tmp_path / "whole.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    job = [WORKERS / "torchtitan_job.py", tmp_path / "run", 14, -7, tmp_path / "run.pt", "ours"]
    variables = {**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([*map(str, [*command, *job])], env=variables, capture_output=True, text=True, timeout=200)
    assert f"exitcode  : {ckptlib.Preempted().code}" in done.stderr, done.stdout + done.stderr
    newest = max(info.step for info in ckptlib.checkpoints(tmp_path / "run" / "checkpoint"))
    assert 7 < newest <= 9
    parted, told = train(tmp_path / "run", tmp_path / "run.pt")
    assert f"loaded True, step {newest}\n" in told
    assert_same(whole, parted)


def test_goes_on_from_its_own_files(tmp_path: Path) -> None:
    """A run of torchtitan's own manager; its newest directory is where the run begins, model only."""
    train(tmp_path / "theirs", tmp_path / "theirs.pt", steps=6, whose="theirs")
    begun, told = train(
        tmp_path / "ours", tmp_path / "ours.pt", steps=0, initial=str(tmp_path / "theirs" / "checkpoint" / "step-6")
    )
    assert "loaded True, step 0" in told
    theirs = torch.load(tmp_path / "theirs.pt", weights_only=True)
    assert all(torch.equal(tensor, begun["model"][name]) for name, tensor in theirs["model"].items())


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    train(tmp_path / "run", tmp_path / "two.pt", steps=6)
    _, told = train(tmp_path / "run", tmp_path / "one.pt", ranks=1, steps=7)
    assert "loaded True, step 6" in told


@pytest.mark.parametrize("option", ["initial_load_in_hf", "last_save_in_hf"])
def test_hugging_faces_files_need_the_models_adapter(tmp_path: Path, option: str) -> None:
    from ckptlib.adapters.torchtitan import CkptlibCheckpointManager

    config = CkptlibCheckpointManager.Config(enable=True, **{option: True})
    with pytest.raises(ValueError, match="need the model's state dict adapter"):
        config.build(
            dataloader=None,
            model_parts=[torch.nn.Linear(1, 1)],
            optimizers=None,
            lr_schedulers=None,
            states={},
            sd_adapter=None,
            base_folder=str(tmp_path),
        )


def test_the_example_is_killed_and_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    variables = {**environment(), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    output = ""
    for name, killed in (("whole", False), ("parted", True), ("parted", False)):
        (tmp_path / name).mkdir(exist_ok=True)
        job = [*command, ROOT / "examples" / "torchtitan_train.py", tmp_path / name, 400]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen([*map(str, job)], env=variables, start_new_session=True, **pipes)
        while killed and not [*(tmp_path / name).glob("checkpoint/steps/*")]:
            time.sleep(0.05)
        if killed:
            subprocess.run(["pkill", "-KILL", "-P", str(process.pid)], check=True)  # the ranks; not their writers
        output = process.communicate(timeout=200)[0]
        assert (process.returncode == 0) == (not killed), output
    first, second = map(int, re.findall("begins behind step ([0-9]+)", output))
    assert 0 < first == second < 400
    whole, parted = (torch.load(tmp_path / name / "final.pt", weights_only=True) for name in ("whole", "parted"))
    assert all(torch.equal(tensor, parted[name]) for name, tensor in whole.items())
