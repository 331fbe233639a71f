"""The ranks of a job: the same answers from one process, from threads, and from real processes over gloo."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launch import fork_ranks
from rankthreads import run_ranks

from ckptlib.ranks.group import Group, SoloGroup, TorchGroup
from ckptlib.ranks.meeting import group_of, meet
from ckptlib.ranks.together import together


def test_three_real_ranks() -> None:
    """Every collective, every failure, groups of some ranks, meetings, and a rank that stays away."""
    output = fork_ranks("groups.py", 3, timeout_s=120)
    assert sorted(line for line in output.splitlines() if line.endswith("done")) == [
        f"rank {rank} done" for rank in range(3)
    ]


def test_ranks_that_survive_their_process_group_find_each_other_in_the_next() -> None:
    """However many groups and meetings each has seen before: one had a failure of its own, or is new."""
    output = fork_ranks("groups_again.py", 2, timeout_s=120)
    assert sorted(line for line in output.splitlines() if line.endswith("done")) == ["rank 0 done", "rank 1 done"]


def check_alone(group: Group) -> None:
    assert (group.rank, group.size, group.global_rank(0)) == (0, 1, 0)
    assert group.gather(b"x") == [b"x"]
    assert group.gather(b"") == [b""]
    assert group.broadcast(b"y") == b"y"
    assert group.broadcast(b"") == b""
    buffer = torch.arange(4, dtype=torch.uint8)
    group.broadcast_from(0, buffer)
    assert buffer.tolist() == [0, 1, 2, 3]
    assert group.max([3, -4]) == [3, -4]
    assert group.extremes([3], [-4, 5]) == ([3], [-4, 5])
    assert group.any(True)
    assert not group.any(False)
    assert group.same(b"z")
    assert together(group, "it", lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        together(group, "it", lambda: 1 // 0)


def test_a_job_of_one_process() -> None:
    group = group_of(None, timedelta(seconds=1))
    assert type(group) is SoloGroup
    check_alone(group)
    meet(None, "here", "save", timedelta(seconds=0))
    group.close()


def test_a_job_of_one_process_that_has_a_process_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = group_of(None, timedelta(seconds=30))
        assert type(group) is TorchGroup
        check_alone(group)
        meet(None, "here", "save", timedelta(seconds=0))
        group.close()
    finally:
        dist.destroy_process_group()


def test_same_compares_all_ranks() -> None:
    for different in range(3):
        answers = run_ranks(3, lambda group, odd=different: group.same(b"a" if group.rank == odd else b"b"))  # type: ignore[misc]
        assert answers == [False] * 3
    assert run_ranks(3, lambda group: group.same(b"a")) == [True] * 3


def test_extremes_of_all_ranks() -> None:
    found = run_ranks(3, lambda group: group.extremes([group.rank, -group.rank], [group.rank + 7]))
    assert found == [([2, 0], [7])] * 3
