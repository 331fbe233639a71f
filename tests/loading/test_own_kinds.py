"""A tensor of one rank, where another has a plain value under the same name."""

from __future__ import annotations

from pathlib import Path

from launch import fork_ranks


def test_each_rank_loads_its_own(tmp_path: Path) -> None:
    cases = "test_a_load_gives_each_rank_its_own", "test_a_load_refuses_a_value_for_a_tensor"
    fork_ranks("own_kinds.py", 2, tmp_path, 120, *cases, timeout_s=120)
    verdicts = {path.name: path.read_text() for path in tmp_path.glob("*.rank?")}
    assert len(verdicts) == 2 * len(cases)
    assert {*verdicts.values()} == {"ok"}, verdicts
