"""An optimizer that divides its parameters between the ranks finds on each what that one had."""

from __future__ import annotations

from pathlib import Path

from launch import fork_ranks


def test_each_rank_gets_back_the_state_that_it_had(tmp_path: Path) -> None:
    fork_ranks("divided_optimizer.py", 2, tmp_path, 120, timeout_s=120)
    verdicts = {path.name: path.read_text() for path in tmp_path.glob("*.rank?")}
    assert len(verdicts) == 2 * 12
    assert {*verdicts.values()} == {"ok"}, verdicts
