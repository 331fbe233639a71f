"""Snapshots sent between ranks, whole, in part and cut off; `refusals` has more cases, `three_ranks` runs them.

Rank 0 sends to rank 1 where a case does not say otherwise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent))

from workers import refusals
from workers.rank_slots import CAPACITY, assert_held, assert_not_ready, content_of, seal, slot_of, taking
from workers.three_ranks import PATIENCE, linked, rank, run_cases, world

from ckptlib.errors import AgreementFailed, CorruptData
from ckptlib.pages import PAGE_BYTES
from ckptlib.peers.ranges import ByteRange
from ckptlib.peers.transfer import receive_slot, send_slot
from ckptlib.ranks import link as link_module
from ckptlib.ranks.link import Link
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import SnapshotReader

CHUNK_BYTES = 1 << 20
"""Per message, here: a small body takes several."""


def messages(directory: Path) -> None:
    """Every size, from memory of both kinds, in both directions at once; what has different tags does not wait."""
    sizes = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES)
    with linked() as link:
        if rank() < 2:
            peer = 1 - rank()

            def send(tag: int) -> None:
                for size in sizes:
                    data = bytes([rank() + 2 * tag]) * size
                    link.send(peer, memoryview(data if tag else bytearray(data)), tag)

            threads = [threading.Thread(target=send, args=(tag,)) for tag in (0, 1)]
            for thread in threads:
                thread.start()
            for tag in (1, 0):
                for size in sizes:
                    buffer = bytearray(size)
                    there = list(link.arriving(peer, memoryview(buffer), tag))
                    assert there == sorted({*range(CHUNK_BYTES, size, CHUNK_BYTES), size} - {0})
                    assert buffer == bytes([peer + 2 * tag]) * size
            for thread in threads:
                thread.join()
            assert link.global_rank(peer) == peer
        assert not link.broken


def whole(directory: Path) -> None:
    """Byte by byte the same, again and again into one slot, out of a slot of another process, and onward."""
    snapshots = SnapshotReader()
    with linked() as link, slot_of(directory, CAPACITY) as slot:
        for step in (1, 2, 3):
            if rank() == 0:
                header = seal(slot, step, 0)
                (directory / "content").write_bytes(content_of(slot, header))
                mine = Slot.open(slot.path) if step == 3 else slot
                send_slot(link, 1, mine, header)
            if rank() == 1:
                header = receive_slot(link, 0, 0, taking(slot), snapshots)
                assert (header.save.step, header.rank, header.ready) == (step, 0, True)
                assert_held(slot, header, directory / "content")
                send_slot(link, 2, slot, header)
            if rank() == 2:
                assert_held(slot, receive_slot(link, 1, 0, taking(slot), snapshots), directory / "content")
            dist.barrier()
        assert not link.broken


def parts_that_are_there(directory: Path) -> None:
    """Only what the receiver lacks is sent; what it has is checked like the rest, and refused where it differs."""
    lacking = [ByteRange(PAGE_BYTES, 5 * PAGE_BYTES), ByteRange(7 * PAGE_BYTES, CAPACITY // 2)]
    with linked() as link, slot_of(directory, CAPACITY) as slot:
        for step, spoiled in ((1, False), (2, True)):
            if rank() == 0:
                header = seal(slot, step, 0)
                (directory / "content").write_bytes(content_of(slot, header))
            dist.barrier()
            body = (directory / "content").read_bytes()[PAGE_BYTES:]
            if rank() == 0:
                with pytest.raises(CorruptData) if spoiled else contextlib.nullcontext():
                    assert send_slot(link, 1, slot, header) == sum(b - a for a, b in lacking)
            if rank() == 1:
                slot.body[: len(body)] = body
                for start, stop in lacking:
                    slot.body[start:stop] = bytes(stop - start)
                if spoiled:
                    slot.body[0] ^= 1
                with pytest.raises(CorruptData) if spoiled else contextlib.nullcontext():
                    receive_slot(link, 0, 0, taking(slot), SnapshotReader(), lambda header: lacking)
                if spoiled:
                    assert_not_ready(slot, step)
                else:
                    assert content_of(slot, slot.read_header()) == (directory / "content").read_bytes()
            slot.unlock()
            dist.barrier()


def nothing_but_documents(directory: Path) -> None:
    with linked() as link, slot_of(directory, PAGE_BYTES) as slot:
        if rank() == 0:
            header = seal(slot, 1, 0, {})
            assert header.body_nbytes == 0
            mine = Slot.open(slot.path)
            (directory / "content").write_bytes(content_of(slot, header))
            send_slot(link, 1, mine, header)
        if rank() == 1:
            assert_held(slot, receive_slot(link, 0, 0, taking(slot), SnapshotReader()), directory / "content")


def all_at_once(directory: Path) -> None:
    """Around a ring, each sending its own and receiving another's; then two of different ranks from one to another."""
    with linked() as link, slot_of(directory, CAPACITY) as own, slot_of(directory, CAPACITY) as replica:
        mine = seal(own, 1, rank())
        (directory / f"content{rank()}").write_bytes(content_of(own, mine))
        dist.barrier()
        sending = threading.Thread(target=send_slot, args=(link, (rank() + 1) % 3, own, mine))
        sending.start()
        origin = (rank() - 1) % 3
        header = receive_slot(link, origin, origin, taking(replica), SnapshotReader())
        sending.join()
        assert_held(replica, header, directory / f"content{origin}")
        dist.barrier()
        held = [(own, mine), (replica, header)]
        if rank() == 0:
            threads = [threading.Thread(target=send_slot, args=(link, 1, *both)) for both in held]
        elif rank() == 1:  # in the other order
            threads = [
                threading.Thread(target=receive_slot, args=(link, 0, origin, taking(slot), SnapshotReader()))
                for slot, origin in ((replica, 2), (own, 0))
            ]
        else:
            threads = []
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if rank() == 1:
            assert_held(replica, replica.read_header(), directory / "content2")
            assert_held(own, own.read_header(), directory / "content0")


def nobody_comes(directory: Path) -> None:
    """Each waits for the other to begin: the time-out is the link's, and its end."""
    with linked(timeout=timedelta(seconds=1)) as link, slot_of(directory, PAGE_BYTES) as slot:
        if rank() < 2:
            with pytest.raises(AgreementFailed, match=f"receiving from rank {1 - rank()} failed on rank {rank()}"):
                receive_slot(link, 1 - rank(), 1 - rank(), taking(slot), SnapshotReader())
            assert link.broken
            with pytest.raises(AgreementFailed):
                send_slot(link, 1 - rank(), slot, seal(slot, 1, 1 - rank(), {}))


class Dies(Link):
    """Killed in the middle of a body, whether it sends or receives."""

    @override
    def send(self, to: int, buffer: memoryview, tag: int) -> None:
        if len(buffer) > CHUNK_BYTES and rank() > 0:
            super().send(to, buffer[:CHUNK_BYTES], tag)
            os.kill(os.getpid(), signal.SIGKILL)
        super().send(to, buffer, tag)

    @override
    def arriving(self, frm: int, buffer: memoryview, tag: int) -> Iterator[int]:
        for there in super().arriving(frm, buffer, tag):
            yield there
            if len(buffer) > CHUNK_BYTES and rank() > 0:
                os.kill(os.getpid(), signal.SIGKILL)


def killed(directory: Path) -> None:
    """Rank 1 as it sends to rank 0, then rank 2 as it receives from it: the last case."""
    link = Dies(world(), PATIENCE)
    with slot_of(directory, CAPACITY) as slot:
        header = seal(slot, 1, 1)
        if rank() == 0:
            with pytest.raises(AgreementFailed, match="receiving from rank 1 failed on rank 0"):
                receive_slot(link, 1, 1, taking(slot), SnapshotReader())
            assert_not_ready(slot, 1)
            assert link.broken
            header = seal(slot, 2, 0)
            with pytest.raises(AgreementFailed, match=r"(sending to|receiving from) rank 2 failed on rank 0"):
                send_slot(link, 2, slot, header)
            assert slot.read_header() == header
        if rank() == 1:
            send_slot(link, 0, slot, header)
        if rank() == 2:
            receive_slot(link, 0, 0, taking(slot), SnapshotReader())


CASES = [
    messages,
    whole,
    parts_that_are_there,
    nothing_but_documents,
    all_at_once,
    *refusals.CASES,
    nobody_comes,
    killed,
]


if __name__ == "__main__":
    link_module.CHUNK_BYTES = CHUNK_BYTES
    run_cases(CASES)
