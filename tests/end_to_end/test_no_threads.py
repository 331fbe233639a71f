"""Where the system has no thread more, a training that has begun goes on, and so do its saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import fork_ranks
from workers.crash_oracle import read_root
from workers.no_threads import TOTAL

TIMEOUT_S = 240.0


@pytest.mark.parametrize(("num_ranks", "copies"), [(1, 0), (2, 0), (2, 1)], ids=["alone", "ranks", "peers"])
def test_a_training_that_can_start_no_thread_saves_all_the_same(tmp_path: Path, num_ranks: int, copies: int) -> None:
    """It ended at its first save; with peers at its first snapshot."""
    printed = fork_ranks("no_threads.py", num_ranks, tmp_path, copies, timeout_s=TIMEOUT_S)
    for rank in range(num_ranks):
        assert f"rank {rank}: failed [], held " in printed
    assert [step.number for step in read_root(tmp_path / "root")] == [2, 4, TOTAL]
