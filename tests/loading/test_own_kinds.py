"""A tensor of one rank, where another has a plain value under the same name."""

from __future__ import annotations

from pathlib import Path

from helpers.verdicts import assert_cases_pass


def test_each_rank_loads_its_own(tmp_path: Path) -> None:
    cases = "test_a_load_gives_each_rank_its_own", "test_a_load_refuses_a_value_for_a_tensor"
    assert_cases_pass("own_kinds.py", 2, tmp_path, len(cases), *cases)
