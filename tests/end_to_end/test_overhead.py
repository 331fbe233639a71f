"""Two real ranks that keep to an overhead: one interval for both, whatever each of them measured."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from launch import fork_ranks
from workers.overhead_job import PREEMPTED, STEPS

import ckptlib

LIMIT_S = 200


class Ran(NamedTuple):
    root: Path
    ranks: list[dict[str, Any]]
    output: str

    @property
    def saved(self) -> list[int]:
        """Steps, as rank 0 saw them begin."""
        found = [line["saved"] for line in self.ranks[0]["steps"] if line["saved"] is not None]
        return sorted({*found, self.ranks[0]["last"]})

    @property
    def agreed(self) -> dict[int, int]:
        return {line["step"]: line["interval"] for line in self.ranks[0]["steps"]}


def run(directory: Path, case: str) -> Ran:
    output = fork_ranks("overhead_job.py", 2, directory, case, timeout_s=LIMIT_S)
    ranks = [json.loads((directory / f"{case}.rank{rank}").read_text()) for rank in range(2)]
    return Ran(directory / "root", ranks, output)


def check(ran: Ran) -> None:
    """What holds of every run, whatever was measured."""
    first, second = ran.ranks
    assert first["last"] == second["last"]
    for key in ("step", "interval", "saved", "snapped"):
        assert [line[key] for line in first["steps"]] == [line[key] for line in second["steps"]], key
    agreed, needed = ran.agreed, [{line["step"]: line["needed"] for line in rank["steps"]} for rank in ran.ranks]
    for step in agreed:
        if step - 2 in agreed:  # told in after_step(step - 1), and in force from the step after it
            assert agreed[step] == max(of[step - 2] for of in needed), step
    committed = [info.step for info in ckptlib.checkpoints(str(ran.root))]
    assert committed[-1] == first["last"]
    assert {*ran.saved} <= {*committed}


def check_intervals(ran: Ran) -> None:
    """No save came before its time, but the last one."""
    before = ran.ranks[0]["start"]
    for step in ran.saved[:-1]:
        assert step - before >= min(ran.agreed.get(at, 20) for at in range(before, step)), (before, step)
        before = step


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("case", ["different", "slow", "peers"])
def test_ranks_agree_on_one_interval(case: str, tmp_path: Path) -> None:
    ran = run(tmp_path, case)
    check(ran)
    check_intervals(ran)
    assert ran.saved[0] >= 20
    assert ran.saved[-1] == STEPS


@pytest.mark.timeout(LIMIT_S + 30)
def test_a_job_that_goes_on_keeps_one_interval_from_the_first_step(tmp_path: Path) -> None:
    """On both ranks, with whatever the start before has measured."""
    run(tmp_path, "plain")
    ran = run(tmp_path, "plain")
    check(ran)
    check_intervals(ran)
    assert (ran.ranks[0]["start"], ran.ranks[0]["last"]) == (STEPS, 2 * STEPS)
    assert ran.agreed[STEPS + 1] == max(rank["steps"][0]["interval"] for rank in ran.ranks)


@pytest.mark.timeout(LIMIT_S + 30)
def test_preempted_between_two_saves(tmp_path: Path) -> None:
    ran = run(tmp_path, "preempted")
    check(ran)
    assert PREEMPTED < ran.ranks[0]["last"] <= PREEMPTED + 3


@pytest.mark.timeout(LIMIT_S + 30)
def test_combined_on_one_rank(tmp_path: Path) -> None:
    """What one rank wants saved, all save."""
    ran = run(tmp_path, "combined")
    check(ran)
    assert ran.saved[0] == 1


@pytest.mark.timeout(LIMIT_S + 30)
def test_snapshots_in_memory_keep_to_a_budget_of_their_own(tmp_path: Path) -> None:
    ran = run(tmp_path, "memory")
    check(ran)
    first, *others, last = ran.saved  # by their own policy, due at 50 and 100, and taken when a slot is free
    assert first >= 50
    assert last == STEPS
    assert len(others) <= 1
    assert all(step >= 100 for step in others)
    taken = sorted({line["snapped"] for line in ran.ranks[0]["steps"] if line["snapped"] is not None})
    assert taken[0] >= 20
    for before, step in itertools.pairwise(taken):
        if step not in ran.saved:
            assert step - before >= min(ran.agreed[at] for at in range(before, step)), (before, step)
    assert "from step 2 on a snapshot in memory every 20 steps" in ran.output


@pytest.mark.timeout(LIMIT_S + 30)
def test_told_in_the_log_and_in_the_manifest(tmp_path: Path) -> None:
    ran = run(tmp_path, "bounded")
    check(ran)
    assert "from step 2 on a save every 20 steps: no save has been measured yet" in ran.output
    assert ran.output.count("from step 2 on") == 1, "rank 0 only"
    assert [*ckptlib.checkpoints(str(ran.root))][-1].metrics == {"ckptlib.interval": ran.agreed[STEPS - 1]}
    show = [sys.executable, "-m", "ckptlib.cli", "show", str(ran.root)]
    shown = subprocess.run(show, capture_output=True, text=True, timeout=150, check=True).stdout
    assert f"ckptlib.interval {ran.agreed[STEPS - 1]}" in shown
