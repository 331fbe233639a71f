"""A job goes back to an earlier step while newer ones are in the memory of its hosts: nothing of these comes back."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from typing import Any

import pytest
from workers import crash_jobs
from workers.peers_bench import MEMORY, STORE, Cluster

import ckptlib

BACK, NEWEST = 4, 9


def command(*arguments: object) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "ckptlib.cli", *map(str, arguments), "--json"], capture_output=True, timeout=150
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def trained_to(cluster: Cluster, step: int, **options: Any) -> None:
    """Up to this step, which is in memory on both hosts; every fourth step is in the store. Then all trainers die."""
    cluster.start("AB", every=4, pauses=[step], **options)
    cluster.until_paused(step)
    cluster.wait_until_committed(step - step % 4)
    cluster.kill()


def listed(cluster: Cluster) -> list[int]:
    return [info.step for info in ckptlib.checkpoints(cluster.root)]


@pytest.mark.slow
def test_a_restart_after_a_rewind_takes_nothing_newer_from_memory(make: Any) -> None:
    cluster = make()
    trained_to(cluster, NEWEST)
    assert cluster.slots_of(0, NEWEST).keys() == {"A", "B"}, "what would be restored is there"
    assert command("rewind", cluster.root, BACK, "--yes")["step"] == BACK
    assert listed(cluster) == [BACK]
    cluster.start("AB", every=4, pauses=[6])
    assert cluster.restored() == {(BACK, STORE)}, cluster.story()
    cluster.until_paused(6)
    cluster.kill()
    cluster.start("AB", every=4)
    assert cluster.restored() == {(6, MEMORY)}, cluster.story()
    cluster.finish()
    assert listed(cluster) == [4, 6, 8, 12], "what was restored from memory alone is saved again"


@pytest.mark.slow
def test_a_restart_after_going_back_goes_on_from_there(make: Any) -> None:
    """It dies before it has saved anything to the store, or to memory."""
    cluster = make()
    trained_to(cluster, NEWEST)
    cluster.start("AB", every=4, back_to=BACK, traps=[{"stage": "loading", "rank": 0}])
    assert [job.join() for job in cluster.jobs] == [-9, 1], cluster.story()
    assert sorted(listed(cluster)) == [4, 8], "the step was not yet restored on all ranks: nothing is abandoned"
    cluster.start("AB", every=4, back_to=BACK, pauses=[BACK])
    assert cluster.restored() == {(BACK, STORE)}, cluster.story()
    cluster.until_paused(BACK)
    assert listed(cluster) == [BACK]
    cluster.kill()
    cluster.start("AB", every=4, pauses=[5])
    assert cluster.restored() == {(BACK, MEMORY)}, cluster.story()
    cluster.until_paused(5)
    cluster.kill()
    cluster.start("AB", every=4)
    assert cluster.restored() == {(5, MEMORY)}, cluster.story()
    cluster.finish()


def test_ranks_that_name_different_steps_go_nowhere(make: Any) -> None:
    cluster = make()
    trained_to(cluster, NEWEST)
    cluster.start("AB", every=4, back_to=[4, 8])
    assert [job.join() for job in cluster.jobs] == [1, 1], cluster.story()
    assert {line["kind"] for line in cluster.wait_for("error")} == {"ValueError"}, cluster.story()
    assert listed(cluster) == [4, 8]


@pytest.mark.slow
def test_a_rewind_is_undone_by_the_full_name(make: Any) -> None:
    cluster = make()
    trained_to(cluster, NEWEST)
    abandoned = command("rewind", cluster.root, BACK, "--yes")["abandoned"]
    assert [int(name[:12]) for name in abandoned] == [8]
    command("rewind", cluster.root, abandoned[-1], "--yes")
    cluster.start("AB", every=4)
    ((step, _),) = cluster.restored()  # from memory where its slot is still there: it is on the history again
    assert step == 8, cluster.story()
    cluster.finish()


@pytest.mark.slow
def test_a_job_that_runs_is_superseded(make: Any) -> None:
    cluster = make()
    cluster.start("AB", every=4, pauses=[9])
    cluster.until_paused(9)
    cluster.wait_until_committed(8)
    command("rewind", cluster.root, BACK, "--yes")
    cluster.say(9)
    assert [job.join() for job in cluster.jobs] == [1, 1], cluster.story()
    assert {line["kind"] for line in cluster.wait_for("error")} <= {"Superseded", "SaveFailed"}, cluster.story()
    assert listed(cluster) == [BACK]
    cluster.start("AB", every=4)
    assert cluster.restored() == {(BACK, STORE)}, cluster.story()
    cluster.finish()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments_around_rewinds(make: Any, seed: int) -> None:
    """Whatever is killed when: no job comes back to a step that it went back behind, and none is lost."""
    luck = random.Random(seed)
    cluster = make()
    trained_to(cluster, NEWEST)
    went_back = False
    for _ in range(8):
        goes_back = luck.random() < 0.5
        if goes_back and luck.random() < 0.5:
            job = subprocess.Popen(
                [sys.executable, "-m", "ckptlib.cli", "rewind", str(cluster.root), str(BACK), "--yes"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(luck.random() * 1.5)
            job.kill()
            went_back |= job.wait() == 0
            went_back |= listed(cluster)[-1] == BACK
            goes_back = False
        cluster.start("AB", every=4, total=40, back_to=BACK if goes_back else None, patient=False)
        time.sleep(luck.random() * 6)
        for one in cluster.jobs:
            one.process.kill()
            one.join()
        told = [line for one in cluster.jobs for line in one.told() if line["what"] == "restored"]
        for line in told:
            generation = int(line["save"].split("-")[1])
            if goes_back:
                assert line["step"] == BACK
            if went_back and line["step"] > BACK:
                assert generation > 1, cluster.story()
        went_back |= goes_back and bool(told)
        assert BACK in listed(cluster), cluster.story()
    cluster.start("AB", every=4, total=listed(cluster)[-1] + 40)
    ((step, _),) = cluster.restored()
    assert step >= BACK
    cluster.finish()
    crash_jobs.end_all(cluster.root)
