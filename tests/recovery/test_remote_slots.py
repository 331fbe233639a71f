"""Slots that are read from another host: the same bytes, as few as are needed, or an error on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
import remotes
from helpers.verdicts import LIMIT_S, assert_passed, run_ranks


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("remotes")
    run_ranks("remotes.py", directory)
    return directory


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("case", [case.__name__ for case in remotes.CASES])
def test_case(verdicts: Path, case: str) -> None:
    assert_passed(verdicts, case)
