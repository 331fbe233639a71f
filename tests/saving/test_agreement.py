"""Ranks act on what they agreed upon: what one of them alone knows, meets or does wrong leaves none of them hanging."""

from __future__ import annotations

from pathlib import Path

import agreement
import pytest
from helpers.verdicts import assert_passed, fork_cases


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one launch of three ranks; a case that hangs is killed, and those before it have their verdicts."""
    directory = tmp_path_factory.mktemp("agreement")
    fork_cases("agreement.py", 3, directory, 400)  # 120 s on a machine that is busy
    return directory


@pytest.mark.timeout(450)
@pytest.mark.parametrize("case", [case.__name__ for case in agreement.CASES])
def test_case(verdicts: Path, case: str) -> None:
    assert_passed(verdicts, case)
