"""What ranks hold alike and then does not stay alike: no step is committed, or held, that gives one rank another's."""

from __future__ import annotations

from pathlib import Path

import divergence
import pytest
from helpers.verdicts import assert_passed, fork_cases


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one launch of two ranks."""
    directory = tmp_path_factory.mktemp("divergence")
    fork_cases("divergence.py", 2, directory, 400)  # 120 s on a machine that is busy
    return directory


@pytest.mark.timeout(450)
@pytest.mark.parametrize("case", [case.__name__ for case in divergence.CASES])
def test_case(verdicts: Path, case: str) -> None:
    assert_passed(verdicts, case, 2)
