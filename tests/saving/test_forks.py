"""A forked child leaves alone what is its parent's, however it ends; the parent saves on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launch import fork_ranks
from places import WORKERS


def slots_of(root: Path) -> list[str]:
    """Left in memory."""
    identity = json.loads((root / "ckptlib.json").read_text())["body"]["id"]
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"ckptlib-{identity[:16]}")]


@pytest.mark.parametrize(
    "case", ["workers", *(pytest.param(case, marks=pytest.mark.slow) for case in ("functions", "checkpointers"))]
)
def test_children_of_one_process(tmp_path: Path, case: str) -> None:
    done = subprocess.run(
        [sys.executable, str(WORKERS / "forks.py"), str(tmp_path / "root"), case],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stdout + done.stderr[-4000:]
    assert "died" not in done.stderr
    assert slots_of(tmp_path / "root") == []


def test_children_of_ranks(tmp_path: Path) -> None:
    output = fork_ranks("forks.py", 2, tmp_path / "root", "ranks", timeout_s=240)
    assert output.count("ok\n") == 2, output
    assert slots_of(tmp_path / "root") == slots_of(tmp_path / "root" / "other") == []
