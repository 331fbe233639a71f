"""The replicator's own threads, on one rank: what they leave to the next snapshot when something goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from helpers.stage import seal
from support import ROOT_ID

from ckptlib.errors import AgreementFailed, ReplicationFailed
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.peers.replicator import Replicator, Round
from ckptlib.peers.transfer import _heed
from ckptlib.policy.peers import Peers
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.placement import place
from ckptlib.staging.arena import Arena
from ckptlib.staging.stager import Content, CopyJob, Staging

GENERATION = GenerationId(1, "0" * 8)
SAVE = SaveId(7, GENERATION)
HEADER = SlotHeader(ROOT_ID, SAVE, 0, 2, 1, 2, 4096, {})


class Wire:
    """A link by which nothing comes, and which notes what is sent."""

    broken = False

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.failed = threading.Event()

    def send(self, to: int, buffer: memoryview, tag: int) -> None:
        self.sent.append(bytes(buffer))

    def recv(self, frm: int, buffer: memoryview, tag: int) -> None:
        self.failed.set()
        raise AgreementFailed("the peer is gone")


class Bench:
    def __init__(self, directory: Path) -> None:
        peers = Peers(timeout=timedelta(seconds=0.05))
        self.arena = Arena(ROOT_ID, GENERATION, directory, 3)
        self.replicator: Any = Replicator(None, 0, place(["A", "B"], 1), peers, lambda: self.arena)
        self.wire = self.replicator._link = Wire()
        slot = Arena(ROOT_ID, GENERATION, directory, 1).take(4096, -1, ())
        content = Content(HEADER, b"", None, {}, {}, 0.0, "xxh3")  # type: ignore[arg-type]
        self.staging = Staging(slot, content)  # type: ignore[arg-type]

    def begin(self, local_replicas: list[CopyJob]) -> Any:
        return self.replicator.begin(Round(ROOT_ID, SAVE, 1, -1, -1), self.staging, local_replicas)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
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


def test_a_slot_is_nobody_elses_while_this_rank_still_copies_into_it(tmp_path: Path) -> None:
    """Though the snapshot that it was for does not come."""
    bench = Bench(tmp_path)
    bench.replicator._readers[1]._tables[1] = ("", type("Table", (), {"digest": ""}), None)
    slot = bench.arena.take(4096, -1, ())
    assert slot is not None
    bench.begin([CopyJob(slot, SlotHeader(ROOT_ID, SAVE, 1, 2, 1, 1, 4096, {}), [], ())])
    assert bench.wire.failed.wait(60)
    time.sleep(0.1)
    assert not bench.replicator.calm
    seal(bench.staging)
    until(lambda: bench.replicator.calm)
