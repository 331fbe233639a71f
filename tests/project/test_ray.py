"""The example of Ray Train: Ray starts its workers again, and they end as those of a job that nobody disturbed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.same import same
from places import ROOT, WORKERS

pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'ray[train]'")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [1, 2])
def test_ray_begins_anew(tmp_path: Path, workers: int) -> None:
    """After an error of the workers, and after a SIGKILL of one: from a committed step, and bit-equal at the end."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), str(WORKERS), *filter(None, sys.path)])
    variables = {**os.environ, "PYTHONPATH": path, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
    command = [sys.executable, WORKERS / "ray_jobs.py", tmp_path, workers]
    done = subprocess.run([*map(str, command)], env=variables, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    whole = torch.load(tmp_path / "whole" / "final.pt", weights_only=True)
    for name in ("whole", "failed", "killed"):
        assert f"reported {tmp_path}/{name}/ckptlib 12\n" in done.stdout
        made = {int(file.read_text()) for file in (tmp_path / name).glob("made-*")}
        assert made == {12} if name == "whole" else 12 - 9 <= min(made) == max(made) < 12
        assert same(torch.load(tmp_path / name / "final.pt", weights_only=True), whole)
