"""Several ranks that a launcher has started, and that do not call init_process_group."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import fork_one

SAVES = """
import sys, torch, ckptlib
for step in (1, 2):
    ckptlib.save(sys.argv[1], {"w": torch.ones(2)}, step=step)
"""


@pytest.mark.parametrize(("world_size", "warnings"), [("1", 0), ("2", 1)])
def test_a_warning_once(tmp_path: Path, world_size: str, warnings: int) -> None:
    script, log = tmp_path / "saves.py", tmp_path / "log"
    script.write_text(SAVES)
    variables = {"WORLD_SIZE": world_size}
    assert fork_one(script, tmp_path / "root", log=log, timeout_s=250, variables=variables) == 0, log.read_text()
    assert log.read_text().count(f"WORLD_SIZE is {world_size}, but there is no process group") == warnings
