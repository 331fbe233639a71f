"""Several ranks that a launcher has started, and that do not call init_process_group."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SAVES = """
import sys, torch, ckptlib
for step in (1, 2):
    ckptlib.save(sys.argv[1], {"w": torch.ones(2)}, step=step)
"""


@pytest.mark.parametrize(("world_size", "warnings"), [("1", 0), ("2", 1)])
def test_a_warning_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: str, warnings: int) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    done = subprocess.run(
        [sys.executable, "-c", SAVES, tmp_path / "root"], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stderr.count(f"WORLD_SIZE is {world_size}, but there is no process group") == warnings
