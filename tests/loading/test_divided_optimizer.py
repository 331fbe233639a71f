"""An optimizer that divides its parameters between the ranks finds on each what that one had."""

from __future__ import annotations

from pathlib import Path

from helpers.verdicts import assert_cases_pass


def test_each_rank_gets_back_the_state_that_it_had(tmp_path: Path) -> None:
    assert_cases_pass("divided_optimizer.py", 2, tmp_path, 12)
