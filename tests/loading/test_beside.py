"""Optimizer state that is nested, or of another shape than its parameter, is divided as the parameter is."""

from __future__ import annotations

from pathlib import Path

from helpers.old_torch import cuts_by_itself
from helpers.verdicts import assert_cases_pass


@cuts_by_itself
def test_state_beside_a_parameter_is_divided_with_it(tmp_path: Path) -> None:
    assert_cases_pass("beside_params.py", 4, tmp_path, 9)
