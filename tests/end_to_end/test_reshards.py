"""What was saved in any layout loads into any other, bit for bit: layouts drawn at random."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers.old_torch import cuts_by_itself
from launch import fork_ranks

pytestmark = cuts_by_itself


def run(tmp_path: Path, seconds: float, first: int, most: int) -> int:
    """The number of batches that were found good."""
    fork_ranks("reshards.py", 5, tmp_path, seconds, first, most, timeout_s=seconds + 130)
    reports = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(5)]
    assert [line for report in reports for line in report["wrong"]] == []
    return int(reports[0]["batches"])


@pytest.mark.timeout(300)
def test_some_random_layouts(tmp_path: Path) -> None:
    """Ten batches; fewer where a busy machine does not come so far in time."""
    assert run(tmp_path, 150, first=0, most=10) > 0


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_random_layouts(tmp_path: Path) -> None:
    """CKPTLIB_FUZZ_SECONDS: how long. CKPTLIB_FUZZ_FIRST: the first batch, to see a certain one again."""
    seconds = float(os.environ.get("CKPTLIB_FUZZ_SECONDS", "240"))
    assert run(tmp_path, seconds, first=int(os.environ.get("CKPTLIB_FUZZ_FIRST", "100")), most=10**9) > 0
