"""What each rank had of its own cannot be divided between another number of ranks, and that is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import fork_ranks


def test_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    fork_ranks("own_values.py", 3, tmp_path, 120, timeout_s=240)
    verdicts = {path.name: path.read_text() for path in tmp_path.glob("*.rank?")}
    assert len(verdicts) == 3 * 9
    assert {*verdicts.values()} == {"ok"}, verdicts
