"""Replicas while the training runs: what holders have themselves is not sent, and a link or a host may fail."""

from __future__ import annotations

from typing import Any

import pytest
from workers.peers_bench import MEMORY, Cluster


def sent(cluster: Cluster) -> list[list[int]]:
    """By rank: bytes sent for the replicas of its snapshots, one after the other."""
    return [[line["sent"] for line in job.told() if line["what"] == "step" and line["sent"]] for job in cluster.jobs]


@pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_holders_have_is_not_sent(make: Any, everything: bool) -> None:
    cluster = make(kind="ddp", own_data=False, everything=everything)
    cluster.start("AB", pauses=[5])
    cluster.until_paused(5)
    for first, *_, last in sent(cluster):
        assert first > 1_500_000, "until its table is known, a snapshot is sent whole"
        assert last == first if everything else last < 50_000
    cluster.lose("B")
    cluster.start("AB")
    assert (cluster.restored(), cluster.received()) == ({(5, MEMORY)}, 1)
    cluster.finish()


@pytest.mark.slow
def test_hosts_that_hold_the_same_keep_each_others_replicas(make: Any) -> None:
    """HSDP, one replica of the state over A and B, the other over C and D."""
    cluster = make(kind="hsdp", own_data=False)
    cluster.start("ABCD", pauses=[5])
    cluster.until_paused(5)
    for first, *_, last in sent(cluster):
        assert (first > 300_000, last < 50_000) == (True, True), (first, last)
    cluster.lose("A", "B")
    cluster.start("ABCD", pauses=[7])
    # a rank's shards are half in its own snapshot, half in that of the rank that holds the same
    assert (cluster.restored(), cluster.received()) == ({(5, MEMORY)}, 4)
    cluster.until_paused(7)
    cluster.lose("B", "C")
    cluster.start("ABCD")
    assert (cluster.restored(), cluster.received()) == ({(7, MEMORY)}, 4)
    cluster.finish()


def test_holders_that_have_something_else(make: Any) -> None:
    """Ranks that should be replicas and are not: what is kept for a rank is what it had, and counts for nothing."""
    cluster = make(kind="ddp", own_data=False)
    cluster.start("AB", total=10**6, pauses=[3, 8])
    cluster.until_paused(3)
    cluster.say(3, {1: "drift"})
    told = cluster.wait_for("paused", 2)
    assert all(line["step"] == 8 and line["held_by_all"] <= 3 for line in told), told
    for rank, job in enumerate(cluster.jobs):
        assert f"replicas of rank {1 - rank} are sent whole from here on" in job.log()
        assert "there is one of step 5 again" in job.log()
        assert "is owned by an optimizer and differs between ranks 0 and 1" in job.log()
    assert all(by_rank[-1] == by_rank[0] for by_rank in sent(cluster))


def test_link_that_dies(make: Any) -> None:
    cluster = make()
    cluster.start("AB", pauses=[3, 5])
    cluster.until_paused(3)
    cluster.say(3, {0: "cut"})
    told = cluster.wait_for("paused", 2)
    assert [(line["step"], line["held"]) for line in told] == [(5, 3)] * 2, "training goes on without replicas"
    cluster.lose("B")
    cluster.start("AB", total=10**6, every=1, pauses=[5], pause_when_held=6)
    assert (cluster.restored(), cluster.received()) == ({(3, MEMORY)}, 1), "what all held has stayed"
    cluster.until_paused(5)
    cluster.say(5, {1: "cut"})
    (step,) = {line["step"] for line in cluster.wait_for("paused", 2)}  # the ranks have connected anew
    cluster.wait_until_committed(6)
    cluster.lose("A")
    cluster.start("AB", total=step + 3)
    assert (cluster.restored(), cluster.received()) == ({(step, MEMORY)}, 1)
    cluster.finish()


@pytest.mark.slow
@pytest.mark.root
def test_peer_without_room(make: Any) -> None:
    """A host whose memory has room for its own snapshots only; then it is given more."""
    cluster = make()
    cluster.start("AB", pauses=[3])
    cluster.until_paused(3)
    own = sum(path.stat().st_size for path in cluster.slots("A")) - 3 * min(
        path.stat().st_size for path in cluster.slots("A")
    )
    cluster.lose("A", "B")
    with cluster.small_memory("B", own + 3 * 4096) as enlarge:
        cluster.start("AB", total=10**6, every=4, pauses=[5], pause_when_held=6)
        assert cluster.restored() == {(0, False)}
        told = cluster.wait_for("paused")
        assert [(line["step"], line["held_by_all"]) for line in told] == [(5, -1)] * 2
        cluster.wait_until_committed(4)
        cluster.kill()
        cluster.start("AB", total=10**6, every=4, pauses=[7], pause_when_held=8)
        assert (cluster.restored(), cluster.received()) == ({(5, MEMORY)}, 0), "every rank has its own"
        cluster.wait_for("paused")
        enlarge()
        cluster.say(7)
        (step,) = {line["step"] for line in cluster.wait_for("paused", 2)}
        cluster.kill()
        cluster.start("AB", total=step + 3)
        assert (cluster.restored(), cluster.received()) == ({(step, MEMORY)}, 0)
        cluster.finish()
