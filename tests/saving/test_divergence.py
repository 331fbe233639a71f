"""What ranks hold alike and then does not stay alike: no step is committed, or held, that gives one rank another's."""

from __future__ import annotations

from pathlib import Path

import divergence
import pytest
from launch import fork_ranks


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one launch of two ranks."""
    directory = tmp_path_factory.mktemp("divergence")
    try:
        fork_ranks("divergence.py", 2, directory, 400, timeout_s=400)  # 120 s on a machine that is busy
    except AssertionError as error:
        (directory / "output").write_text(str(error))
    return directory


@pytest.mark.timeout(450)
@pytest.mark.parametrize("case", [case.__name__ for case in divergence.CASES])
def test_case(verdicts: Path, case: str) -> None:
    for rank in range(2):
        path = verdicts / f"{case}.rank{rank}"
        verdict = path.read_text() if path.exists() else "hung:\n" + (verdicts / "output").read_text()
        assert verdict == "ok", f"rank {rank}: {verdict}"
