"""Snapshots in the memory of peers: trainers, writers and hosts are lost, and others come in their place."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from workers.peers_bench import MEMORY, STORE, num_open, wait_until

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("hosts", "kind"),
    [
        ("AB", "fsdp"),
        pytest.param("AABB", "fsdp", marks=slow),
        pytest.param("ABC", "ddp", marks=slow),
        pytest.param("AAB", "fsdp", marks=slow),
        pytest.param("AABB", "ddp", marks=slow),
        pytest.param("AAAABBBB", "fsdp", marks=slow),
    ],
)
def test_lost_one_after_the_other(make: Any, hosts: str, kind: str) -> None:
    cluster = make(kind=kind, own_data=kind == "fsdp")  # DDP adds up in another order after a restart
    cluster.start(hosts, pauses=[2])
    assert cluster.restored() == {(0, False)}

    # One trainer is killed, the others fail by themselves: every host has what its ranks need.
    cluster.until_paused(2)
    cluster.kill([cluster.jobs[1]])
    cluster.say(2)
    assert [job.join() for job in cluster.jobs] == [-9 if job is cluster.jobs[1] else 1 for job in cluster.jobs]
    cluster.start(hosts, pauses=[4])
    assert (cluster.restored(), cluster.received()) == ({(2, MEMORY)}, 0)

    # All trainers of a host are killed, and its writers: its slots have no process any more.
    cluster.until_paused(4)
    cluster.lose()
    cluster.kill_writers()
    cluster.start(hosts, pauses=[6])
    assert (cluster.restored(), cluster.received()) == ({(4, MEMORY)}, 0)

    # A host is lost with its memory; an empty one takes its place.
    cluster.until_paused(6)
    cluster.lose("B")
    cluster.start(hosts)
    assert (cluster.restored(), cluster.received()) == ({(6, MEMORY)}, hosts.count("B"))
    cluster.finish()


@pytest.mark.parametrize(
    ("copies", "lost", "found"),
    [
        (2, "AB", MEMORY),  # C has both
        pytest.param(1, "AB", STORE, marks=slow),  # a ring of three: A's replica was on B
        pytest.param(2, "BC", MEMORY, marks=slow),
        pytest.param(2, "ABC", STORE, marks=slow),
    ],
)
def test_several_hosts_lost_at_once(make: Any, copies: int, lost: str, found: bool) -> None:
    cluster = make(copies=copies, every=4)
    cluster.start("ABC", pauses=[6])
    cluster.until_paused(6)
    cluster.wait_until_committed(4)
    cluster.lose(*lost)
    cluster.start("ABC")
    assert cluster.restored() == {(6, MEMORY) if found == MEMORY else (4, STORE)}
    assert cluster.received() == (len(lost) if found == MEMORY else 0)
    cluster.finish()


@slow
def test_one_host_of_each_pair_lost(make: Any) -> None:
    cluster = make()
    cluster.start("ABCD", pauses=[3])
    cluster.until_paused(3)
    cluster.lose("A", "D")
    cluster.start("ABCD")
    assert (cluster.restored(), cluster.received()) == ({(3, MEMORY)}, 2)
    cluster.finish()


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("ddp", marks=slow)])
def test_other_numbers_of_ranks(make: Any, kind: str) -> None:
    cluster = make(kind=kind, own_data=False)
    cluster.start("AABB", pauses=[2])
    cluster.until_paused(2)
    cluster.lose()
    cluster.start("AB", pauses=[4])
    assert cluster.restored() == {(2, MEMORY)}
    cluster.until_paused(4)
    cluster.lose("A")
    cluster.start("BBAA", pauses=[6])  # of A, nothing is there; of B, its own slots and A's replicas
    assert cluster.restored() == {(4, MEMORY)}
    cluster.until_paused(6)
    cluster.lose()
    cluster.start("B", copies=0, pauses=[8])
    assert (cluster.restored(), cluster.received()) == ({(6, MEMORY)}, 0)
    cluster.until_paused(8)
    cluster.lose("A")
    cluster.start("AB")
    assert cluster.restored() == {(8, MEMORY)}
    cluster.finish()


@pytest.mark.slow
def test_stages_cut_in_another_way(make: Any) -> None:
    """What a rank takes over of another stage, plain values too, lies on a host that it knew nothing of."""
    cluster = make(kind="stages", own_data=False)
    cluster.start("ABCD", pauses=[4])
    cluster.until_paused(4)
    cluster.lose("B", "D")
    cluster.start("CA", pauses=[7])
    assert cluster.restored() == {(4, MEMORY)}, cluster.story()
    cluster.until_paused(7)
    cluster.lose("C")
    cluster.start("A", copies=0)
    assert cluster.restored() == {(7, MEMORY)}, cluster.story()
    cluster.finish()


def test_slots_of_writers_that_are_slow_to_go(make: Any) -> None:
    cluster = make()
    cluster.start("AB", pauses=[3])
    cluster.until_paused(3)
    wait_until(lambda: all(num_open(pid) == 6 for pid in cluster.writers()), "the writers have no slots")
    writers = cluster.stop_writers()
    cluster.kill()
    before = cluster.in_use()
    assert before
    cluster.start("AB", pauses=[6], patient=False)
    assert cluster.restored() == {(3, MEMORY)}
    cluster.until_paused(6)
    assert before <= set(cluster.slots()), "a process that is alive may still read them"
    for pid in writers:
        os.kill(pid, signal.SIGCONT)
    cluster.await_let_go(before)
    cluster.say(6)
    cluster.finish()
