"""Starts a script of `workers.three_ranks` or `workers.rank_cases`, and reads what its ranks say of each case."""

from __future__ import annotations

import signal
from pathlib import Path

from helpers.forkserver import context, start_server
from launch import be_rank, environment, fork_ranks
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


def fork_cases(script: str, num_ranks: int, directory: Path, limit_s: int) -> None:
    """All cases of `rank_cases` in one launch; one that hangs is killed, and those before it have their verdicts."""
    try:
        fork_ranks(script, num_ranks, directory, limit_s, timeout_s=limit_s)
    except AssertionError as error:
        (directory / "output").write_text(str(error))


def assert_cases_pass(
    script: str, num_ranks: int, directory: Path, num_cases: int, *names: str, limit_s: int = 270
) -> None:
    """Those of `rank_cases` that are named, or all, in one launch."""
    fork_ranks(script, num_ranks, directory, limit_s, *names, timeout_s=limit_s)
    verdicts = {path.name: path.read_text() for path in directory.glob("*.rank?")}
    assert len(verdicts) == num_ranks * num_cases
    assert {*verdicts.values()} == {"ok"}, verdicts


def assert_passed(directory: Path, case: str, num_ranks: int = NUM_RANKS) -> None:
    """On all ranks; those that the case `killed` has killed are dead."""
    for rank in range(num_ranks):
        if case == "killed" and rank > 0:
            assert (directory / "exits").read_text().split()[rank] == str(-signal.SIGKILL)
            continue
        path = directory / f"{case}.rank{rank}"
        verdict = path.read_text() if path.exists() else "did not come to it:\n" + _outputs(directory)
        assert verdict == "ok", f"rank {rank}: {verdict}"


def _outputs(directory: Path) -> str:
    return "\n".join(path.read_text()[-5000:] for path in sorted(directory.glob("output*")))
