"""What works where slots cannot be: on macOS and Windows, as far as Linux without their missing calls can tell."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from places import DATA, WORKERS

ROOT = DATA / "written-by-0.1" / "root"


@pytest.mark.parametrize("platform", [pytest.param("macos", marks=pytest.mark.slow), "windows"])
def test_roots_are_read_and_saving_says_why_not(platform: str) -> None:
    done = subprocess.run(
        [sys.executable, str(WORKERS / "elsewhere.py"), platform, str(ROOT)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stdout + done.stderr
