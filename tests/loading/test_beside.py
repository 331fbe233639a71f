"""Optimizer state that is nested, or of another shape than its parameter, is divided as the parameter is."""

from __future__ import annotations

from pathlib import Path

from launch import fork_ranks


def test_state_beside_a_parameter_is_divided_with_it(tmp_path: Path) -> None:
    fork_ranks("beside_params.py", 4, tmp_path, 300, timeout_s=300)
    verdicts = {path.name: path.read_text() for path in tmp_path.glob("*.rank?")}
    assert len(verdicts) == 4 * 9
    assert {*verdicts.values()} == {"ok"}, verdicts
