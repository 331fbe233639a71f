"""A hog comes and leaves beside two real ranks that keep to an overhead: the interval follows it up and down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import fork_ranks
from workers.hog_job import BUDGET, CASES, COMES, LEAVES

import ckptlib

LIMIT_S = 200
INTERVALS = 5
"""After which the budget must be kept again, and the interval must have come down."""


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("case", CASES)
def test_the_interval_follows_a_hog_up_and_down(case: str, tmp_path: Path) -> None:
    """Judged by steps alone: how long one is on this machine, and how long a save, changes nothing."""
    fork_ranks("hog_job.py", 2, tmp_path, case, timeout_s=LIMIT_S)
    first, second = (json.loads((tmp_path / f"{case}.rank{rank}").read_text()) for rank in range(2))
    assert first["saved"] == second["saved"]
    assert first["intervals"] == second["intervals"]
    saved, intervals = first["saved"], first["intervals"]
    assert {*saved} <= {info.step for info in ckptlib.checkpoints(str(tmp_path / "root"))}

    comes, leaves = saved[COMES - 1], saved[LEAVES - 1]
    beside = intervals[comes : saved[COMES + INTERVALS - 1]]
    assert max(beside) >= max(CASES[case].held / 2, 2 * intervals[comes - 1])
    begins = saved[COMES + INTERVALS - 1]  # the interval after those is kept beside the hog
    longer = sum(begins < step <= leaves for step in second["longer"])
    extra = longer * (CASES[case].times - 1)
    assert extra <= 1.5 * BUDGET * (leaves - begins), "in steps without the hog"
    assert min(intervals[leaves : saved[LEAVES + INTERVALS - 1]]) <= max(beside) / 2, "and down again"
