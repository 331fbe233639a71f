"""A rank that dies in the middle of a save."""

from __future__ import annotations

from pathlib import Path

from launch import fork_ranks

from ckptlib.stores.testing import write_plan


def test_the_others_are_told_long_before_collectives_time_out(tmp_path: Path) -> None:
    """Which is after five minutes; nobody ends the ranks that live, as a launcher would."""
    plan = tmp_path / "plan.json"
    write_plan(plan, [])
    output = fork_ranks("dead_rank.py", 2, tmp_path / "root", plan, timeout_s=120)
    assert "told: " in output, output
    assert "steps: [1]" in output, output
