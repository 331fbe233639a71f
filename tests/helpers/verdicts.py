"""Starts a script of `workers.three_ranks`, and reads what its ranks say of each case."""

from __future__ import annotations

import signal
from pathlib import Path

from helpers.forkserver import context, start_server
from launch import be_rank, environment
from places import WORKERS
from workers.three_ranks import NUM_RANKS

LIMIT_S = 150


def run_ranks(script: str, directory: Path) -> None:
    """All cases in one launch; the exit status of each rank is in `exits`."""
    start_server()
    ranks = []
    for rank in range(NUM_RANKS):
        log, arguments = directory / f"output{rank}", [str(rank), str(directory), str(LIMIT_S)]
        ranks.append(context.Process(target=be_rank, args=(str(log), environment(), WORKERS / script, arguments)))
        ranks[-1].start()
    try:
        for process in ranks:
            process.join(LIMIT_S + 30)
        exits = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    (directory / "exits").write_text(" ".join(map(str, exits)))


def assert_passed(directory: Path, case: str) -> None:
    """On all ranks; those that the case `killed` has killed are dead."""
    for rank in range(NUM_RANKS):
        if case == "killed" and rank > 0:
            assert (directory / "exits").read_text().split()[rank] == str(-signal.SIGKILL)
            continue
        path = directory / f"{case}.rank{rank}"
        verdict = path.read_text() if path.exists() else "did not come to it:\n" + _outputs(directory)
        assert verdict == "ok", f"rank {rank}: {verdict}"


def _outputs(directory: Path) -> str:
    return "\n".join(path.read_text()[-5000:] for path in sorted(directory.glob("output*")))
