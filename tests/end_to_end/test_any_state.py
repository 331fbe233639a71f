"""What ranks tie, cut and hold, each in its own way, is refused by name or loads bit for bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tied
from helpers.old_torch import cuts_by_itself
from launch import fork_ranks

pytestmark = cuts_by_itself

FUZZ_S = float(os.environ.get("CKPTLIB_FUZZ_S", "600"))
FUZZ_SEED = int(os.environ.get("CKPTLIB_FUZZ_SEED", "1000000"))


def fuzz(directory: Path, seconds: float, most: int, seed: int) -> list[dict[str, object]]:
    """What each rank found."""
    fork_ranks("anystate.py", 4, directory, seconds, most, seed, timeout_s=seconds + 120)
    return [json.loads((directory / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("any_state")
    fuzz(directory, 120, 32, 1)
    return directory


@pytest.mark.timeout(280)
@pytest.mark.parametrize("case", [case.__name__ for case in tied.CASES])
def test_case(quick: Path, case: str) -> None:
    assert {rank: (quick / f"{case}.rank{rank}").read_text() for rank in range(4)} == dict.fromkeys(range(4), "ok")


@pytest.mark.timeout(280)
def test_some_states(quick: Path) -> None:
    found = [json.loads((quick / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert [one["wrong"] for one in found] == [[]] * 4
    assert found[0]["cases"] == 32
    assert found[0]["saved"] > 10
    assert found[0]["refused"] > 5


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_S + 300)
def test_any_state(tmp_path: Path) -> None:
    """For CKPTLIB_FUZZ_S seconds, from CKPTLIB_FUZZ_SEED on."""
    found = fuzz(tmp_path, FUZZ_S, 10**9, FUZZ_SEED)
    print({name: count for name, count in found[0].items() if name != "wrong"})
    assert [one["wrong"] for one in found] == [[]] * 4
