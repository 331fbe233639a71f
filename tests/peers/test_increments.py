"""Replicas that are made of increments: the same to the last bit, or sent as they are, and coverage says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import increments
import pytest
from helpers.verdicts import assert_passed
from launch import fork_ranks
from workers.peers_bench import MEMORY

LIMIT_S = 150

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("increments")
    (directory / "output").write_text(fork_ranks("increments.py", 2, directory, timeout_s=LIMIT_S))
    return directory


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("case", [case.__name__ for case in increments.CASES])
def test_case(verdicts: Path, case: str) -> None:
    assert_passed(verdicts, case, 2)


def coded(cluster: Any) -> list[list[int]]:
    """By rank: bytes of each snapshot that went as increments."""
    return [[line["coded"] for line in job.told() if line["what"] == "step" and line["sent"]] for job in cluster.jobs]


@pytest.mark.parametrize(("hosts", "others"), [("AB", "AB"), pytest.param("AABB", "AB", marks=slow)])
def test_restored_from_replicas(make: Any, hosts: str, others: str) -> None:
    """A host is lost again and again; the training comes to the very bits of one without faults."""
    cluster = make(own_data=False, link_codec="optimizer")
    cluster.start(hosts, pauses=[5])
    cluster.until_paused(5)
    assert all(by_rank[0] == 0 and min(by_rank[1:]) > 0 for by_rank in coded(cluster)), coded(cluster)
    cluster.lose("B")
    cluster.start(others, pauses=[9])
    assert cluster.restored() == {(5, MEMORY)}
    cluster.until_paused(9)
    assert all(by_rank[0] == 0 and min(by_rank[1:]) > 0 for by_rank in coded(cluster)), coded(cluster)
    cluster.lose("A")
    cluster.start(others)
    assert cluster.restored() == {(9, MEMORY)}
    cluster.finish()


@pytest.mark.parametrize(("stage", "rank"), [("coding", 1), pytest.param("decoding", 0, marks=slow)])
def test_killed_in_the_middle_of_increments(make: Any, stage: str, rank: int) -> None:
    cluster = make(link_codec="optimizer")
    cluster.start("AB", traps=[{"stage": stage, "rank": rank, "step": 4}])
    assert [job.join() for job in cluster.jobs] == [-9 if r == rank else 1 for r in range(2)], cluster.story()
    cluster.lose("B")
    cluster.start("AB")
    assert (cluster.restored(), cluster.received()) == ({(3, MEMORY)}, 1), cluster.story()
    cluster.finish()


@pytest.mark.slow
def test_link_that_dies(make: Any) -> None:
    """The first snapshot over the new one has nothing to build on; those behind it have."""
    cluster = make(link_codec="optimizer")
    cluster.start("AB", total=10**6, pauses=[3], pause_when_held=7)
    cluster.until_paused(3)
    cluster.say(3, {0: "cut"})
    told = cluster.wait_for("paused", 2)
    assert all(line["held_by_all"] >= 7 for line in told), told
    (step,) = {line["step"] for line in told}
    cluster.lose("B")
    cluster.start("AB", total=step + 3)
    assert (cluster.restored(), cluster.received()) == ({(step, MEMORY)}, 1)
    cluster.finish()
