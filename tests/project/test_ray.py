"""The example of Ray Train: Ray starts its workers again after an error, and they end as those of a run without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.same import same
from places import ROOT

pytest.importorskip("ray.train", reason="Ray is not installed: pip install 'ray[train]'")

BOTH = """
import os, sys
import ray, ray_train

paths = os.pathsep.join(sys.path)
ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})
ray_train.main(sys.argv[1] + "/whole", 12)
result = ray_train.main(sys.argv[1] + "/parted", 12, fails_at=8)
print("reported", open(result.checkpoint.path + "/ckptlib.txt").read())
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_begins_anew(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), *filter(None, sys.path)])
    variables = {**os.environ, "PYTHONPATH": path, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300"}
    command = [sys.executable, "-c", BOTH, str(tmp_path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]
    assert f"reported {tmp_path}/parted/ckptlib 12" in done.stdout
    weights = [torch.load(tmp_path / name / "final.pt", weights_only=True) for name in ("whole", "parted")]
    assert same(*weights)
