"""Ranks act on what they agreed upon: what one of them alone knows, meets or does wrong leaves none of them hanging."""

from __future__ import annotations

from pathlib import Path

import agreement
import pytest
from helpers.old_torch import cuts_by_itself, fsdp2_on_the_host
from helpers.verdicts import assert_passed, fork_cases

NEED = {
    **dict.fromkeys(("batch_norm_by_rank", "going_back", "more_ranks"), fsdp2_on_the_host),
    "late_sharded_expert": cuts_by_itself,
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one launch of three ranks; a case that hangs is killed, and those before it have their verdicts."""
    directory = tmp_path_factory.mktemp("agreement")
    fork_cases("agreement.py", 3, directory, 400)  # 120 s on a machine that is busy
    return directory


@pytest.mark.timeout(450)
@pytest.mark.parametrize("case", [pytest.param(c.__name__, marks=NEED.get(c.__name__, ())) for c in agreement.CASES])
def test_case(verdicts: Path, case: str) -> None:
    assert_passed(verdicts, case)
