"""Documents below a megabyte that try to take much time or memory: all who read one end soon, with an error of ours.

Processor time is measured, not time on the wall. The bounds here are generous, for busy machines; what blows up takes
gigabytes or minutes. On a machine with nothing else to do, all take below a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import WORKERS

WORKER = WORKERS / "hostile.py"
SECONDS, MEGABYTES = 12, 256  # of a processor: beside other tests, twice to three times what it takes alone


def check(directory: Path, *arguments: str) -> int:
    """How many readings there were."""
    paths = [str(WORKER.parent.parent), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, str(WORKER), str(directory), *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    bad = [one for one in found if one["ended"].startswith("!") or one["seconds"] > SECONDS or one["mb"] > MEGABYTES]
    assert bad == []
    return len(found)


@pytest.mark.slow
def test_small_documents_take_little(tmp_path: Path) -> None:
    assert check(tmp_path, "quick") > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_attack_on_every_document(tmp_path: Path) -> None:
    assert check(tmp_path) > 300


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
def test_random_attacks(tmp_path: Path, seed: int) -> None:
    assert check(tmp_path, str(seed), "100") > 100
