"""The replicator's own threads, on one rank: what they leave to the next snapshot when something goes wrong."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.stage import seal
from support import ROOT_ID
from typing_extensions import override
from workers.rank_slots import CAPACITY, STATE
from workers.rank_slots import seal as sealed

from ckptlib.errors import AgreementFailed, CorruptData, ReplicationFailed, TornSnapshot
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.peers import connection, incoming, outgoing
from ckptlib.peers.connection import Connection
from ckptlib.peers.increment_sender import _Sent
from ckptlib.peers.replicator import Replicator
from ckptlib.peers.rounds import Round
from ckptlib.peers.transfer import _heed, send_slot
from ckptlib.policy.peers import Peers
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.placement import place
from ckptlib.slots.slot import Slot
from ckptlib.staging.arena import Arena
from ckptlib.staging.other_slots import OtherSlots
from ckptlib.staging.pair import CopySource
from ckptlib.staging.stager import Content, CopyJob, Staging

GENERATION = GenerationId(1, "0" * 8)
SAVE = SaveId(7, GENERATION)
PATIENT = Peers().timeout
HEADER = SlotHeader(ROOT_ID, SAVE, 0, 2, 1, 2, 4096, {})


class Wire:
    """A link by which nothing comes, and which notes what is sent."""

    broken = False

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.num_cuts = 0
        self.failed = threading.Event()
        self.free = threading.Event()
        """Nothing is sent before it is set."""
        self.free.set()

    def send(self, to: int, buffer: memoryview, tag: int) -> None:
        assert self.free.wait(150)
        self.sent.append(bytes(buffer))

    def recv(self, frm: int, buffer: memoryview, tag: int) -> None:
        self.failed.set()
        raise AgreementFailed("the peer is gone")

    def global_rank(self, rank: int) -> int:
        return rank

    def cut(self) -> None:
        self.num_cuts += 1


class Bench:
    def __init__(self, directory: Path, link: str = "raw", timeout: timedelta = timedelta(seconds=0.05)) -> None:
        peers = Peers(timeout=timeout, link=link)
        self.arena = Arena(ROOT_ID, GENERATION, directory, 3)
        self.replicator: Any = Replicator(None, 0, place(["A", "B"], 1), peers, lambda: self.arena)
        self.wire = self.replicator.connection.link = Wire()
        slot = Arena(ROOT_ID, GENERATION, directory, 1).take(4096, -1, ())
        content = Content(HEADER, b"", None, {}, {}, 0.0, "xxh3")  # type: ignore[arg-type]
        self.staging = Staging(slot, content)  # type: ignore[arg-type]

    def begin(self, local_replicas: list[CopyJob]) -> Any:
        return self.replicator.begin(Round(ROOT_ID, SAVE, 1, -1, -1), self.staging, local_replicas)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 150
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_of_a_snapshot_that_is_late_its_holders_are_told(tmp_path: Path) -> None:
    """Else the one that waits for it would take the next for it, refuse that, and so on for ever."""
    bench = Bench(tmp_path)
    fate = bench.begin([])
    until(lambda: fate.settled)
    assert fate.failed
    (page,) = bench.wire.sent
    with pytest.raises(ReplicationFailed, match="there is no snapshot of step 7"):
        _heed(page, 1)
    seal(bench.staging)


def test_of_a_snapshot_whose_header_is_damaged_its_holders_are_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path)  # its slot has no header at all
    seal(bench.staging)
    fate = bench.begin([])
    until(lambda: fate.settled)
    assert fate.failed
    (page,) = bench.wire.sent
    with pytest.raises(ReplicationFailed, match=bench.staging.slot.path.name):
        _heed(page, 1)


def test_a_slot_is_nobody_elses_while_this_rank_still_copies_into_it(tmp_path: Path) -> None:
    """Though the snapshot that it was for does not come."""
    bench = Bench(tmp_path)
    bench.replicator._incoming[1]._reader._tables[1] = ("", type("Table", (), {"digest": ""}), None)
    slot = bench.arena.take(4096, -1, ())
    assert slot is not None
    bench.begin([CopyJob(slot, SlotHeader(ROOT_ID, SAVE, 1, 2, 1, 1, 4096, {}), [], ())])
    assert bench.wire.failed.wait(60)
    time.sleep(0.1)
    assert not bench.replicator.calm
    seal(bench.staging)
    until(lambda: bench.replicator.calm)


def test_what_came_damaged_says_nothing_of_what_this_rank_has_itself(tmp_path: Path) -> None:
    """The holder had copied none of it itself: the network altered a page."""
    bench = Bench(tmp_path)

    def recv(frm: int, buffer: memoryview, tag: int) -> None:
        bench.wire.failed.set()
        raise CorruptData("altered on its way")

    bench.wire.recv = recv
    bench.begin([])
    assert bench.wire.failed.wait(60)
    seal(bench.staging)
    until(lambda: bench.replicator.calm)
    assert not bench.replicator._incoming[1]._is_unlike


def test_what_fails_in_the_middle_ends_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a rank takes the next message for the one that did not come, and gloo aborts the process that gets a
    longer one than it expects."""
    bench = Bench(tmp_path)

    def no_memory(*args: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(outgoing, "send_slot", no_memory)
    monkeypatch.setattr(incoming, "receive_slot", no_memory)
    bench.staging.slot.write_header(HEADER)
    seal(bench.staging)
    fate = bench.begin([])
    until(lambda: fate.settled and bench.replicator.calm)
    assert fate.failed
    assert bench.wire.num_cuts == 2


def test_one_that_waits_for_another_snapshot_than_comes_ends_the_link(tmp_path: Path) -> None:
    """Else each that comes would be compared with the one before it, and refused, for ever."""
    bench = Bench(tmp_path)
    offer = replace(HEADER, rank=1, number=2, sequence=4)

    def recv(frm: int, buffer: memoryview, tag: int) -> None:
        buffer[:] = offer.encode()

    bench.wire.recv = recv
    bench.begin([])
    until(lambda: bench.wire.num_cuts == 1)
    seal(bench.staging)
    until(lambda: bench.replicator.calm)
    assert any(b"offers snapshot 2" in page for page in bench.wire.sent), "the other one is told"


def test_one_that_is_let_go_leaves_no_thread(tmp_path: Path) -> None:
    """A training that is begun again in the same process, as by NVRx, would have more of them each time."""
    before = {*threading.enumerate()}
    bench = Bench(tmp_path)
    fate = bench.begin([])
    seal(bench.staging)
    until(lambda: fate.settled)
    names = sorted(thread.name for thread in {*threading.enumerate()} - before)
    assert names == ["ckptlib-from-1", "ckptlib-to-1"]
    bench.replicator.close(clean=False)
    until(lambda: not {*threading.enumerate()} - before)


def test_one_whose_threads_never_ran_is_let_go_without_them(tmp_path: Path) -> None:
    """Else a session that is given up where the system has no thread more ends by another error than that."""
    bench = Bench(tmp_path)
    before = threading.stack_size(1 << 46)  # more than there are addresses
    try:
        with pytest.raises(RuntimeError):
            bench.replicator.start()
        bench.replicator.close(clean=False)
    finally:
        threading.stack_size(before)


class Silent(Wire):
    """A link to a host that is gone, as without power: nothing comes until a time-out."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.over = threading.Event(), threading.Event()

    @override
    def recv(self, frm: int, buffer: memoryview, tag: int) -> None:
        self.waits.set()
        assert self.over.wait(150)
        super().recv(frm, buffer, tag)


def test_what_is_held_of_a_rank_that_is_gone_is_found_by_the_next_job_of_this_process(tmp_path: Path) -> None:
    """Before the rank is given up: only here is the rank's share of the newest step."""
    of_others = {*threading.enumerate()}  # of tests before this one, some of which wait for more to do
    bench = Bench(tmp_path, "optimizer")
    wire = bench.replicator.connection.link = Silent()
    replica, overwritten = held(bench, 6), held(bench, 5)
    bench.arena.mark_void(overwritten)
    bench.begin([])
    assert wire.waits.wait(60)
    own = {thread for thread in threading.enumerate() if thread.name == "ckptlib-from-1"} - of_others
    bench.replicator.close(clean=False)
    with OtherSlots(ROOT_ID, GenerationId(2, "1" * 8), [tmp_path]).opened() as slots:
        assert [slot.path for slot in slots] == [replica.path]
        assert slots[0].read_header().save.step == 6
    wire.over.set()
    seal(bench.staging)
    until(lambda: not any(thread.is_alive() for thread in own))


class Pipe:
    """A link from rank 1 to rank 0 and back, in this process."""

    broken = False

    def __init__(self, rank: int, messages: dict[tuple[int, int], queue.SimpleQueue[bytes]]) -> None:
        self.rank, self._messages = rank, messages

    def global_rank(self, rank: int) -> int:
        return rank

    def _to(self, rank: int, tag: int) -> queue.SimpleQueue[bytes]:
        return self._messages.setdefault((rank, tag), queue.SimpleQueue())

    def send(self, to: int, buffer: memoryview, tag: int) -> None:
        self._to(to, tag).put(bytes(buffer))

    def recv(self, frm: int, buffer: memoryview, tag: int) -> None:
        buffer[:] = self._to(self.rank, tag).get(timeout=150)

    def arriving(self, frm: int, buffer: memoryview, tag: int) -> Iterator[int]:
        self.recv(frm, buffer, tag)
        yield len(buffer)


@pytest.mark.parametrize("held_by_all", [4, 5], ids=["into a new slot", "into an old one"])
def test_what_a_failed_snapshot_has_copied_is_not_kept(tmp_path: Path, held_by_all: int) -> None:
    """Rank 0 copies "w" of rank 1's replica itself. Its own snapshot of step 6 is torn, and so is that copy."""
    bench, messages = Bench(tmp_path, timeout=PATIENT), dict[tuple[int, int], queue.SimpleQueue[bytes]]()
    replicator, own = bench.replicator, Slot.create(tmp_path, "own", CAPACITY)
    replicator.connection.link, link = Pipe(0, messages), Pipe(1, messages)

    def replicate(step: int, held_by_all: int, copies: bool) -> int:
        """The bytes of the body that rank 1 sent."""
        header = sealed(own, step, 1)
        now = Round(ROOT_ID, header.save, step, held_by_all, held_by_all)
        source = CopySource("w", torch.zeros(STATE["w"].shape, dtype=torch.int32), False)
        local = replicator.local_replicas(now, lambda rank, table: ([source], (0,)) if copies else None)
        assert len(local) == copies
        staging = Staging(bench.staging.slot, bench.staging.content)
        staging.error = TornSnapshot(f"step {step}: torn on this rank")
        replicator.begin(now, staging, local)
        seal(staging)
        sent = send_slot(link, 0, own, header)  # type: ignore[arg-type]
        until(lambda: replicator.calm)
        return sent

    replicate(4, 3, copies=False)
    replicate(5, 4, copies=False)
    assert replicate(6, held_by_all, copies=True) == own.read_header().body_nbytes
    assert not replicator._incoming[1]._is_unlike, "what this rank has is not known to differ"
    headers = [slot.read_header() for slot in bench.arena.slots]
    assert {5, 6} <= {header.save.step for header in headers if header.ready}


class Torn(Pipe):
    """It ends when the second answer has come through, of which this end never hears that."""

    answers = 0

    @override
    def send(self, to: int, buffer: memoryview, tag: int) -> None:
        super().send(to, buffer, tag)
        if tag == 3:
            self.answers += 1
            if self.answers == 2:
                raise AgreementFailed("the peer is gone")


def test_a_replica_that_its_owner_counts_on_is_kept(tmp_path: Path) -> None:
    """Also where this rank does not know whether the owner heard that it is there."""
    bench, messages = Bench(tmp_path, timeout=PATIENT), dict[tuple[int, int], queue.SimpleQueue[bytes]]()
    own = Slot.create(tmp_path, "own", CAPACITY)
    bench.replicator.connection.link = Torn(0, messages)
    header = sealed(own, 5, 1)
    bench.replicator.begin(Round(ROOT_ID, header.save, 5, 4, 4), None, [])
    send_slot(Pipe(1, messages), 0, own, header)  # type: ignore[arg-type]
    until(lambda: bench.replicator.calm)
    (replica,) = bench.arena.slots
    assert replica.read_header() == header
    assert bench.replicator._incoming[1]._take(Round(ROOT_ID, SAVE, 7, 5, 5), header.body_nbytes) is not replica


def held(bench: Bench, step: int) -> Slot:
    """A slot that is ready, and that rank 1 sent last, and was sent last."""
    slot = bench.arena.take(4096, -1, ())
    assert slot is not None
    header = replace(HEADER, rank=1, save=replace(SAVE, step=step), sequence=2 * step)
    slot.write_header(header)
    slot.unlock()
    bench.arena.mark_ready(slot, step)
    bench.replicator._incoming[1]._steps.sealed(slot, header)
    bench.replicator._outgoing[1]._steps._last = _Sent(slot, header, {})
    return slot


def test_what_an_increment_builds_on_is_overwritten_last(tmp_path: Path) -> None:
    """Though its snapshot failed elsewhere, and any slot would do."""
    bench = Bench(tmp_path, "optimizer")
    slots = [held(bench, step) for step in (4, 5, 6)]
    bench.replicator._incoming[1]._steps.sealed(slots[0], slots[0].read_header())
    now = Round(ROOT_ID, SAVE, 7, -1, 6)
    assert bench.replicator._incoming[1]._take(now, 4096) == slots[1]
    bench.arena.take(4096, 100, [slots[0], slots[1]])
    assert bench.replicator._incoming[1]._take(now, 4096) != slots[0]
    slots[0].write_header(replace(HEADER, sequence=21))
    assert bench.replicator._incoming[1]._steps.base() is None, "it is another snapshot's by now"


def test_a_base_is_in_use_while_something_is_sent(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "optimizer")
    slot = held(bench, 6)
    assert bench.replicator.bases == []
    bench.wire.free.clear()
    fate = bench.begin([])
    assert bench.replicator.bases == [slot]
    bench.wire.free.set()
    until(lambda: fate.settled and bench.replicator.calm)
    assert bench.replicator.bases == []
    seal(bench.staging)


def test_ranks_that_connect_anew_hold_up_the_training_for_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the time-out of a peer: where a firewall drops what is new, each try takes as long as it may."""
    given: list[timedelta] = []

    def link(over: object, timeout: timedelta, connect_within: timedelta) -> Wire:
        given.append(connect_within)
        time.sleep(delays.pop())
        return Wire()

    monkeypatch.setattr(connection, "Link", link)
    over: Any = object()
    delays = [0.0, 0.0]
    ranks = Connection(over, Peers(timeout=timedelta(minutes=1)))
    ranks.connect()
    ranks.drop()
    ranks._broken = None
    ranks.connect()
    assert given == [timedelta(minutes=1), connection.RECONNECT]
    monkeypatch.setattr(connection, "RECONNECT", timedelta(0))
    given.clear()
    delays = [0.0, 0.05]
    ranks = Connection(over, Peers(timeout=timedelta(minutes=1)))
    ranks.connect()
    ranks.connect()
    assert given[1] >= timedelta(seconds=0.2)
    given.clear()
    delays, least = [0.0, 0.01], timedelta(microseconds=1)
    ranks = Connection(over, Peers(timeout=least))
    ranks.connect()
    ranks.connect()
    assert given == [least] * 2, "no longer than a peer may take"


def test_nothing_builds_on_what_failed_or_is_void() -> None:
    now = Round(ROOT_ID, SAVE, 7, 3, 5, frozenset({6}))
    assert [now.may_go(step) for step in range(2, 8)] == [False, False, True, True, True, False]
