"""Slots that are read from another host: the same bytes, as few as are needed, or an error on both sides."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import remotes
from places import WORKERS

LIMIT_S = 150


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases in one launch; the exit status of each rank is in `exits`."""
    directory = tmp_path_factory.mktemp("remotes")
    ranks = []
    for rank in range(remotes.NUM_RANKS):
        with (directory / f"output{rank}").open("w") as output:
            command = [sys.executable, str(WORKERS / "remotes.py"), str(rank), str(directory), str(LIMIT_S)]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            ranks.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
    try:
        exits = [process.wait(LIMIT_S + 30) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    (directory / "exits").write_text(" ".join(map(str, exits)))
    return directory


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("case", [case.__name__ for case in remotes.CASES])
def test_case(verdicts: Path, case: str) -> None:
    for rank in range(remotes.NUM_RANKS):
        if case == "killed" and rank > 0:
            assert (verdicts / "exits").read_text().split()[rank] == str(-signal.SIGKILL)
            continue
        path = verdicts / f"{case}.rank{rank}"
        verdict = path.read_text() if path.exists() else "did not come to it:\n" + outputs(verdicts)
        assert verdict == "ok", f"rank {rank}: {verdict}"


def outputs(directory: Path) -> str:
    return "\n".join(path.read_text()[-5000:] for path in sorted(directory.glob("output*")))
