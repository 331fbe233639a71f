"""SIGKILL in the midst of a snapshot, of a restore, and at random: no step is lost that was known to be safe."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from launch import forked
from places import WORKERS
from workers.peers_bench import MEMORY, PAGE_BYTES

slow = pytest.mark.slow


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                # stage, rank, lost host, whether the snapshot is restored
                ("staging", 1, "", False),
                ("sealed", 1, "", True),
                ("sending", 1, "B", False),
                ("received", 0, "B", False),
                ("replicated", 0, "B", True),
            ],
            id="some",
        ),
        pytest.param(
            [
                ("staging", 0, "B", False),
                ("sealing", 1, "", False),
                ("sealing", 0, "A", False),
                ("sealed", 1, "B", False),  # its replica was not there yet
                ("sealed", 0, "A", False),
                ("sending", 0, "", True),
                ("receiving", 0, "B", False),
                ("receiving", 1, "", True),
                ("received", 1, "", True),
                ("received", 1, "A", False),
                ("replicated", 1, "A", True),
                ("replicated", 1, "", True),
            ],
            id="more",
            marks=slow,
        ),
    ],
)
def test_killed_while_a_snapshot_is_made(make: Any, cases: list[tuple[str, int, str, bool]]) -> None:
    cluster = make()
    total, expected = 3 * len(cases) + 3, {(0, False)}
    received = 0
    for stage, rank, lost, whole in cases:
        step = max(expected)[0] + 3
        cluster.start("AB", total=total, traps=[{"stage": stage, "rank": rank, "step": step}])
        assert (cluster.restored(), cluster.received()) == (expected, received), cluster.story()
        statuses = [job.join() for job in cluster.jobs]
        assert statuses == [-9 if r == rank else 1 for r in range(2)], cluster.story()
        cluster.lose(*lost)
        expected, received = {(step if whole else step - 1, MEMORY)}, len(lost)
    cluster.start("AB", total=total)
    assert (cluster.restored(), cluster.received()) == (expected, received), cluster.story()
    cluster.finish()


def test_before_it_connects_for_the_first_time(tmp_path: Path) -> None:
    """The other rank is told long before it has waited for as long as a peer may take."""
    codes, output = forked(WORKERS / "dead_peer.py", 2, tmp_path, timeout_s=60, each=True)
    assert codes == [0, -signal.SIGKILL], output
    assert "told: agreement among 2 ranks failed on rank 0: rank 1 is gone" in output, output


def test_a_host_lost_behind_a_restart_whose_step_had_no_replicas_yet(make: Any) -> None:
    """The step before it had them, and stays until the ranks hold one of the new job."""
    cluster = make()
    cluster.start("AB", traps=[{"stage": "sealed", "rank": 1, "step": 3}])
    assert [job.join() for job in cluster.jobs] == [1, -9], cluster.story()
    cluster.start("AB", traps=[{"stage": "sealed", "rank": 1, "step": 3}])  # it keeps what it restored
    assert [job.join() for job in cluster.jobs] == [1, -9], cluster.story()
    assert "restoring step 3 from memory" in cluster.jobs[0].log()
    cluster.lose("B")
    cluster.start("AB")
    assert (cluster.restored(), cluster.received()) == ({(2, MEMORY)}, 1), cluster.story()
    cluster.finish()


@pytest.mark.slow
def test_where_memory_lacks_for_two_snapshots_of_the_job_before(make: Any) -> None:
    """The older one goes: else there would never be a replica again."""
    cluster = make()
    with cluster.small_memory("A", 1 << 26):
        cluster.start("AB", total=10**6, traps=[{"stage": "received", "rank": 0, "step": 3}])
        assert [job.join() for job in cluster.jobs] == [-9, 1], cluster.story()
        kept = {cluster.slots_of(rank, step).get("A") for rank, step in [(0, 2), (1, 2), (0, 3)]}
        for path in {*cluster.slots("A")} - kept:
            path.unlink()
        there = os.statvfs(cluster.arena("A"))
        room = (there.f_blocks - there.f_bfree) * PAGE_BYTES + 30 * PAGE_BYTES  # and one slot
        subprocess.run(["mount", "-o", f"remount,size={room}", str(cluster.arena("A"))], check=True)
        cluster.start("AB", total=10**6, pause_when_held=5)
        assert (cluster.restored(), cluster.received()) == ({(3, MEMORY)}, 0), cluster.story()
        cluster.wait_for("paused")


@pytest.mark.slow
def test_killed_while_it_is_restored(make: Any) -> None:
    """Again and again: nothing is lost by it."""
    cluster = make()
    cluster.start("AB", pauses=[6])
    cluster.until_paused(6)
    cluster.lose("B")
    for stage, rank in (("reading", 1), ("serving", 0), ("loading", 0), ("loaded", 1), ("loaded", 0)):
        cluster.start("AB", traps=[{"stage": stage, "rank": rank}])
        statuses = [job.join() for job in cluster.jobs]
        assert statuses == [-9 if r == rank else 1 for r in range(2)], (stage, cluster.story())
        cluster.lose("B")
    cluster.start("AB")
    assert (cluster.restored(), cluster.received()) == ({(6, MEMORY)}, 1)
    cluster.finish()


@pytest.mark.parametrize(
    ("hosts", "count", "link"),
    [
        ("AB", 6, "raw"),
        pytest.param("AB", 60, "raw", marks=[slow, pytest.mark.timeout(1800)]),
        pytest.param("AABB", 40, "raw", marks=[slow, pytest.mark.timeout(1800)]),
        pytest.param("ABCD", 40, "raw", marks=[slow, pytest.mark.timeout(1800)]),
        pytest.param("AABB", 40, "optimizer", marks=[slow, pytest.mark.timeout(1800)]),
    ],
)
def test_faults_at_random(make: Any, hosts: str, count: int, link: str) -> None:
    """Whoever is killed, wherever that finds it: no step is lost that the ranks knew to be safe from such a fault.

    A step is safe from the loss of a host when all ranks were known to hold it since the last one.
    """
    chance = random.Random(f"{hosts} {count}")
    cluster = make(every=7, link_codec=link)
    newest, reached, lost_since = 0, 0, set[str]()
    for _ in range(count):
        drags = [chance.choice((0, 0.01, 0.03)) for _ in hosts]  # a transfer takes as long as some steps
        cluster.start(hosts, total=10**6, settle=False, drags=drags, patient=chance.random() < 0.5)
        begun = chance.random() < 0.9
        if begun:
            assert newest <= min(cluster.restored())[0], cluster.story()
            cluster.wait_for("step", chance.randint(1, 9))
        time.sleep(chance.uniform(0, 0.1))  # no assertion depends on where this ends
        if chance.random() < 0.2:
            cluster.kill_writers(chance.sample(sorted({*hosts}), 1))
            time.sleep(chance.uniform(0, 0.1))
        lost = chance.choice(hosts) if chance.random() < 0.4 else None
        if lost is not None:
            cluster.lose(lost)
            cluster.kill_writers()  # one may wait a minute for the part of a lost one
        elif not begun or chance.random() < 0.5:
            cluster.kill()  # who is still about to join the others would wait for half a minute
        else:
            cluster.kill([chance.choice(cluster.jobs)])
            assert {job.join() for job in cluster.jobs} == {-signal.SIGKILL, 1}, cluster.story()
        told = [line for job in cluster.jobs for line in job.told()]
        reached = max([reached, *(line["step"] for line in told if line["what"] == "step")])
        held = max((line["held_by_all"] for line in told if line["what"] == "step"), default=-1)
        restored = max((line["step"] for line in told if line["what"] == "restored"), default=-1)
        if held >= 0:
            newest, lost_since = max(held, restored), set()
        elif lost is not None and lost_since - {lost}:
            newest = 0
        if lost is not None:
            lost_since.add(lost)
        newest = max(newest, cluster.newest_committed())
    cluster.start(hosts, total=reached + 30)  # memory may have more than what the ranks knew to be safe
    assert newest <= min(cluster.restored())[0] <= reached + 30, cluster.story()
    cluster.finish()
