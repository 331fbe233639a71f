"""A forked child leaves alone what is its parent's, however it ends; the parent saves on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from launch import fork_one, fork_ranks
from places import WORKERS


def slots_of(root: Path) -> list[str]:
    """Left in memory."""
    identity = json.loads((root / "ckptlib.json").read_text())["body"]["id"]
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"ckptlib-{identity[:16]}")]


@pytest.mark.parametrize(
    "case", ["workers", *(pytest.param(case, marks=pytest.mark.slow) for case in ("functions", "checkpointers"))]
)
def test_children_of_one_process(tmp_path: Path, case: str) -> None:
    log = tmp_path / "log"
    status = fork_one(WORKERS / "forks.py", tmp_path / "root", case, log=log, timeout_s=240)
    said = log.read_text()
    assert (status, "ok" in said.splitlines(), "died" in said) == (0, True, False), said
    assert slots_of(tmp_path / "root") == []


def test_children_of_ranks(tmp_path: Path) -> None:
    output = fork_ranks("forks.py", 2, tmp_path / "root", "ranks", timeout_s=240)
    assert output.count("ok\n") == 2, output
    assert slots_of(tmp_path / "root") == slots_of(tmp_path / "root" / "other") == []
