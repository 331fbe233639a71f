"""What each rank had of its own cannot be divided between another number of ranks, and that is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.verdicts import assert_cases_pass


def test_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader", reason="pip install torchdata")
    assert_cases_pass("own_values.py", 3, tmp_path, 9)
