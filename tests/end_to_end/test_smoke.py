"""What scripts/test-versions runs with other versions of torch runs with this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from places import WORKERS


@pytest.mark.slow  # ten imports of torch; the demo is started by torchrun, killed and resumed as well
def test_it_saves_is_killed_and_resumes(tmp_path: Path) -> None:
    command = [sys.executable, str(WORKERS / "smoke.py"), str(tmp_path / "smoke")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("what came back is the same\n")
