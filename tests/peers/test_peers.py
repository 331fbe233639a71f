"""Snapshots in the memory of peers: real trainers, real writers, SIGKILL, lost hosts, damage and dead links.

After each fault: the newest step that the faults have left whole is restored, on all ranks the same one; training goes
on to the very bits of a training without faults; and neither slots nor processes stay behind.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from workers.peers_bench import PAGE_BYTES, Cluster, Node, gold, num_open, wait_until

from ckptlib.slots.header import SlotHeader

MEMORY, STORE = True, False

slow = pytest.mark.slow


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Cluster] = []

    def make(**options: Any) -> Cluster:
        made.append(Cluster(tmp_path, **options))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


# -- what is lost


@pytest.mark.parametrize(
    ("hosts", "kind"),
    [
        ("AB", "fsdp"),
        ("AABB", "fsdp"),
        ("ABC", "ddp"),
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
        (1, "AB", STORE),  # a ring of three: A's replica was on B
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


# -- what is damaged


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def header_of(path: Path) -> SlotHeader:
    with path.open("rb") as file:
        return SlotHeader.decode(file.read(PAGE_BYTES), str(path))


def forge(path: Path, **fields: Any) -> None:
    """A header with other fields, and a digest that fits."""
    with path.open("r+b") as file:
        file.write(replace(header_of(path), **fields).encode())


def flip_document(name: str) -> Callable[[Path], None]:
    return lambda path: flip(path, header_of(path).documents[name][0] + 100)


def forge_document(name: str, offset: int | None = None, nbytes: int | None = None) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        documents = dict(header_of(path).documents)
        found = documents[name]
        documents[name] = (found[0] if offset is None else offset, found[1] if nbytes is None else nbytes, found[2])
        forge(path, documents=documents)

    return damage


def replace_by_link(path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def vanish(path: Path) -> None:
    path.unlink()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "body": lambda path: flip(path, PAGE_BYTES + 1000),
    "header": lambda path: flip(path, 200),
    "layout": flip_document("layout"),
    "table": flip_document("table"),
    "snapshot": flip_document("snapshot"),
    "cut in the body": lambda path: os.truncate(path, PAGE_BYTES + 1000),
    "cut in the header": lambda path: os.truncate(path, 100),
    "not there": vanish,
    "a link": replace_by_link,
    "of another user": lambda path: os.chown(path, 12345, 12345),
    "absurd body": lambda path: forge(path, body_nbytes=2**62),
    "absurd layout": forge_document("layout", nbytes=2**39),
    "absurd table": forge_document("table", nbytes=2**39),
    "absurd place": forge_document("snapshot", offset=2**62),
    "another rank": lambda path: forge(path, rank=5),
    "another root": lambda path: forge(path, root_id="0" * 32),
    "another snapshot": lambda path: forge(path, number=77),
}

STRANGE = {"cut in the header", "a link", "of another user"}
"""What nobody touches, to the end."""


def clean_up(cluster: Cluster, name: str, path: Path) -> None:
    if name in STRANGE:
        path.unlink()
        (path.parent / "elsewhere").unlink(missing_ok=True)


SOME = ["body", "header", "layout", "snapshot", "cut in the body", "a link", "of another user", "absurd layout"]


@pytest.mark.parametrize("names", [pytest.param(SOME, id="some"), pytest.param([*DAMAGES], id="all", marks=slow)])
def test_damage_to_a_slot_of_its_own(make: Any, names: list[str]) -> None:
    """The replica is sent instead."""
    cluster = make()
    cluster.start("AB", total=2 * len(names) + 2, pauses=[2])
    for step, name in enumerate(names, 1):
        cluster.until_paused(2 * step)
        cluster.lose()
        path = cluster.slots_of(rank=0, step=2 * step)["A"]
        DAMAGES[name](path)
        cluster.start("AB", total=2 * len(names) + 2, pauses=[2 * step + 2])
        assert (cluster.restored(), cluster.received()) == ({(2 * step, MEMORY)}, 1), (name, cluster.story())
        clean_up(cluster, name, path)
    cluster.say(2 * len(names) + 2)
    cluster.finish()


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["body", "layout", "absurd table"], id="some"),
        pytest.param([*DAMAGES], id="all", marks=slow),
    ],
)
def test_damage_to_the_only_copy(make: Any, names: list[str]) -> None:
    """The snapshot before it is restored, by all ranks."""
    cluster = make()
    step = 3
    cluster.start("AB", total=3 * len(names) + 4, pauses=[step])
    for name in names:
        cluster.until_paused(step)
        cluster.lose("B")
        path = cluster.slots_of(rank=1, step=step)["A"]
        DAMAGES[name](path)
        cluster.start("AB", total=3 * len(names) + 4, pauses=[step + 2])
        assert (cluster.restored(), cluster.received()) == ({(step - 1, MEMORY)}, 1), (name, cluster.story())
        clean_up(cluster, name, path)
        step += 2
    cluster.until_paused(step)
    cluster.say(step)
    cluster.finish()


def test_damage_to_everything_in_memory(make: Any) -> None:
    cluster = make(every=4)
    cluster.start("AB", pauses=[6])
    cluster.until_paused(6)
    cluster.wait_until_committed(4)
    cluster.lose()
    for path in cluster.slots():
        flip(path, PAGE_BYTES + 1000)
    cluster.start("AB")
    assert cluster.restored() == {(4, STORE)}
    assert all(len(line["skipped"]) >= 2 for line in cluster.wait_for("restored"))
    cluster.finish()


def test_steps_are_not_mixed(make: Any) -> None:
    """Rank 0 has steps 5 and 6, rank 1 has 4 and 5."""
    cluster = make()
    cluster.start("AB", pauses=[6])
    cluster.until_paused(6)
    cluster.lose()
    for path in cluster.slots_of(rank=1, step=6).values():
        path.unlink()
    cluster.start("AB")
    assert (cluster.restored(), cluster.received()) == ({(5, MEMORY)}, 0)
    cluster.finish()


# -- what holders have themselves


def sent(cluster: Cluster) -> list[list[int]]:
    """By rank: bytes sent for the replicas of its snapshots, one after the other."""
    return [[line["sent"] for line in job.told() if line["what"] == "step" and line["sent"]] for job in cluster.jobs]


@pytest.mark.parametrize("everything", [False, True])
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


# -- what goes wrong between the peers


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


# -- SIGKILL in the midst of it


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                # stage, rank, lost host, whether the snapshot is restored
                ("staging", 1, "", False),
                ("sealing", 1, "", False),
                ("sealed", 1, "", True),
                ("sealed", 1, "B", False),  # its replica was not there yet
                ("sending", 1, "B", False),
                ("receiving", 0, "B", False),
                ("received", 0, "B", False),
                ("replicated", 0, "B", True),
            ],
            id="some",
        ),
        pytest.param(
            [
                ("staging", 0, "B", False),
                ("sealing", 0, "A", False),
                ("sealed", 0, "A", False),
                ("sending", 0, "", True),
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
    ("hosts", "count"),
    [
        ("AB", 6),
        pytest.param("AB", 60, marks=[slow, pytest.mark.timeout(1800)]),
        pytest.param("AABB", 40, marks=[slow, pytest.mark.timeout(1800)]),
        pytest.param("ABCD", 40, marks=[slow, pytest.mark.timeout(1800)]),
    ],
)
def test_faults_at_random(make: Any, hosts: str, count: int) -> None:
    """Whoever is killed, wherever that finds it: no step is lost that the ranks knew to be safe from such a fault.

    A step is safe from the loss of a host when all ranks were known to hold it since the last one.
    """
    chance = random.Random(f"{hosts} {count}")
    cluster = make(every=7)
    newest, lost_since = 0, set[str]()
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
        held = max((line["held_by_all"] for line in told if line["what"] == "step"), default=-1)
        restored = max((line["step"] for line in told if line["what"] == "restored"), default=-1)
        if held >= 0:
            newest, lost_since = max(held, restored), set()
        elif lost is not None and lost_since - {lost}:
            newest = 0
        if lost is not None:
            lost_since.add(lost)
        newest = max(newest, cluster.newest_committed())
    cluster.start(hosts, total=newest + 30)
    assert newest <= min(cluster.restored())[0], cluster.story()
    cluster.finish()


# -- what is stale


def test_abandoned_branch(make: Any) -> None:
    """What a job went back behind is not restored, though its steps are higher."""
    cluster = make(every=4)
    cluster.start("AB", pauses=[10])
    cluster.until_paused(10)
    cluster.wait_until_committed(4)
    cluster.wait_until_committed(8)
    cluster.lose()
    cluster.start("AB", load_step=4, pauses=[7])
    cluster.wait_for("paused")
    cluster.lose()
    cluster.start("AB", pauses=[9])
    assert (cluster.restored(), cluster.received()) == ({(7, MEMORY)}, 0)
    cluster.until_paused(9)
    cluster.lose("B")
    cluster.start("AB")
    assert (cluster.restored(), cluster.received()) == ({(9, MEMORY)}, 1)
    cluster.finish()


def test_slots_of_another_root(make: Any, tmp_path: Path) -> None:
    """In the same memory; one of them even has a name of this root."""
    cluster = make()
    cluster.start("AB", pauses=[9])
    cluster.until_paused(9)
    cluster.lose()
    others = cluster.slots()
    cluster.root = tmp_path / "another"
    cluster.start("AB", pauses=[3])
    assert cluster.restored() == {(0, False)}
    cluster.until_paused(3)
    cluster.lose()
    ours = [path for path in cluster.slots() if path not in others]
    prefix = ours[0].name.rsplit("-", 1)[0]
    for path in others:
        shutil.copy(path, path.parent / f"{prefix}-{path.name.rsplit('-', 1)[1]}")
    cluster.start("AB")
    assert (cluster.restored(), cluster.received()) == ({(3, MEMORY)}, 0)
    assert set(others) <= set(cluster.slots())
    for path in others:
        path.unlink()
    cluster.finish()


# -- real agents, on nodes with memory of their own


@pytest.mark.root
def test_torchrun_restarts_the_ranks(nodes: Any, tmp_path: Path) -> None:
    """One rank is killed; torchrun ends the other, and starts both again on the same host."""
    node = nodes("node", 2, ["--standalone", "--max-restarts", "1"])
    node.wait_for("paused", 2)
    os.kill(node.told("made")[0]["pid"], signal.SIGKILL)
    nodes.gate.write_text("{}")
    found = node.wait_for("restored", 4)[2:]
    assert [(line["step"], line["in_memory"], line["received"]) for line in found] == [(5, MEMORY, 0)] * 2
    node.finish()
    assert sorted(line["digest"] for line in node.told("done")) == sorted(gold(tmp_path, "fsdp", 2, True, 12))


@pytest.mark.root
def test_a_node_is_lost_and_another_takes_its_place(nodes: Any, tmp_path: Path) -> None:
    port = free_port()

    def agent(name: str, is_host: int) -> Node:
        conf = f"is_host={is_host},keep_alive_interval=1,keep_alive_max_attempt=2"
        options = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "x"]
        return nodes(name, 1, [*options, "--rdzv-conf", conf, "--max-restarts", "3"])

    first, lost = agent("first", 1), agent("lost", 0)
    first.wait_for("paused")
    lost.wait_for("paused")
    lost.lose()
    nodes.gate.write_text("{}")
    other = agent("other", 0)
    (again,) = first.wait_for("restored", 2)[1:]
    (here,) = other.wait_for("restored")
    assert (again["step"], again["in_memory"], again["received"]) == (5, MEMORY, 0)
    assert (here["step"], here["in_memory"], here["received"]) == (5, MEMORY, 1)
    first.finish()
    other.finish()
    done = [*first.told("done"), *other.told("done")]
    assert sorted(line["digest"] for line in done) == sorted(gold(tmp_path, "fsdp", 2, True, 12))


class Nodes:
    """Makes them; all ranks pause behind step 5 until the gate is there."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "gates").mkdir()
        self.gate = directory / "gates" / "5"
        self.made: list[Node] = []

    def __call__(self, name: str, num_ranks: int, options: list[str]) -> Node:
        self.made.append(
            Node(
                self._directory,
                name,
                num_ranks,
                options,
                url=str(self._directory / "root"),
                hosts=["A", "B"],
                arenas={},
                total=12,
                pauses=[5],
                gates=str(self.gate.parent),
            )
        )
        return self.made[-1]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    for node in nodes.made:
        node.lose()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
