"""Snapshots sent between ranks, whole, damaged and cut off: transfers.py <rank> <directory> <seconds>, three of them.

Plain processes: torchrun would end all of them with the one that is killed. Every rank writes to
<directory>/<case>.rank<n> "ok", or what was wrong. Rank 0 sends to rank 1 where a case does not say otherwise.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from typing_extensions import override

sys.path.insert(0, str(Path(__file__).parent.parent))

from support import ROOT_ID, layout_of, shards_of

from ckptlib.errors import AgreementFailed, CorruptData, FormatError, NoRoom, PeerRefused, ReplicationFailed
from ckptlib.format.body_layout import body_nbytes, lay_out
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.pages import PAGE_BYTES
from ckptlib.peers.transfer import MAX_DOCUMENTS_BYTES, receive_slot, send_slot, withdraw
from ckptlib.ranks import link as link_module
from ckptlib.ranks.link import Link
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import SnapshotReader, check_body
from ckptlib.staging.copies import Source
from ckptlib.staging.stager import Content, Stager

NUM_RANKS = 3

PATIENCE = timedelta(seconds=60)
"""Long enough for a busy machine; whoever waits for it has found a bug."""

CHUNK_BYTES = 1 << 20
"""Per message, here: a small body takes several."""

STATE = {
    "w": np.random.default_rng(0).integers(0, 2**32, (9, 64, 1024), np.uint32),
    "b": np.arange(5, dtype=np.int64),
    "count": np.array(7.0),
}
"""2.25 MiB: two full messages and a part of one."""


def rank() -> int:
    return dist.get_rank()


@contextlib.contextmanager
def linked(cls: type[Link] = Link, timeout: timedelta = PATIENCE) -> Iterator[Link]:
    """Made by all ranks together. Whatever they do with it ends before any of them closes it."""
    world = dist.group.WORLD
    assert world is not None
    link = cls(world, timeout)
    yield link
    dist.barrier()
    link.close()


@contextlib.contextmanager
def slot_of(directory: Path, capacity: int) -> Iterator[Slot]:
    slot = Slot.create(directory, f"rank{rank()}", capacity)
    yield slot
    slot.close()
    slot.unlink()


CAPACITY = 3 << 20


def seal(slot: Slot, step: int, origin: int, state: dict[str, np.ndarray] | None = None) -> SlotHeader:
    """What a rank holds after a step; every step and every rank has other bytes."""
    arrays = {
        name: np.asarray(array + step + 100 * origin) for name, array in (STATE if state is None else state).items()
    }
    layout = layout_of(arrays)
    table = lay_out(layout, shards_of(layout, 0))
    header = SlotHeader(
        root_id=ROOT_ID,
        save=SaveId(step, GenerationId(1, "00000001")),
        rank=origin,
        world_size=NUM_RANKS,
        number=step,
        sequence=2 * step,
        body_nbytes=body_nbytes(table),
        documents={},
    )
    content = Content(header, layout.encoded, table, {"step": step}, {}, 0.0, XXH3)
    names = [layout.tensors[t].name for t in table.tensors]
    stager = Stager(lambda staging: None)
    staging = stager.begin(slot, content, [Source(n, torch.from_numpy(arrays[n]), False) for n in names])
    staging.go()
    staging.wait_sealed(60)
    stager.close()
    return slot.read_header()


def content_of(slot: Slot, header: SlotHeader) -> bytes:
    """All that makes it the snapshot it is, header included."""
    end = max(offset + nbytes for offset, nbytes, _ in header.documents.values())
    with slot.path.open("rb") as file:
        return file.read(end)


def taking(slot: Slot, offered: list[SlotHeader] | None = None) -> Callable[[SlotHeader], Slot]:
    def take(header: SlotHeader) -> Slot:
        if offered is not None:
            offered.append(header)
        assert slot.try_write_lock()
        return slot

    return take


def flip(slot: Slot, at: int) -> None:
    with slot.path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def assert_held(slot: Slot, header: SlotHeader, expected: Path) -> None:
    """The slot is a replica of what another rank has written to a file."""
    assert slot.read_header() == header
    assert content_of(slot, header) == expected.read_bytes()
    check_body(slot, SnapshotReader().read(slot, header))


def assert_not_ready(slot: Slot, step: int) -> None:
    header = slot.read_header()
    assert not header.ready
    assert header.save.step == step


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
    lacking = [(PAGE_BYTES, 5 * PAGE_BYTES), (7 * PAGE_BYTES, CAPACITY // 2)]
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


def recovers(link: Link, slot: Slot, step: int) -> None:
    """After a failure that leaves both ranks whole, the next transfer over the same link succeeds."""
    slot.unlock()
    if rank() == 0:
        send_slot(link, 1, slot, seal(slot, step, 0))
    if rank() == 1:
        assert receive_slot(link, 0, 0, taking(slot), SnapshotReader()) == slot.read_header()
        assert slot.read_header().save.step == step
    assert not link.broken


def damaged_body(directory: Path) -> None:
    """One bit, flipped after the sealing: in the first and last byte of the large tensor, and in a small one."""
    with linked() as link, slot_of(directory, CAPACITY) as slot:
        for step, (name, at) in enumerate([("w", 0), ("w", STATE["w"].nbytes - 1), ("b", STATE["w"].nbytes + 8)], 1):
            named = rf"{name}\[.*\] at \[\d+:\+\d+\] changed in memory after it was sealed"
            if rank() == 0:
                header = seal(slot, step, 0)
                flip(slot, PAGE_BYTES + at)
                with pytest.raises(CorruptData, match=f"rank 1 says: .*{named}"):
                    send_slot(link, 1, slot, header)
            if rank() == 1:
                with pytest.raises(CorruptData, match=named):
                    receive_slot(link, 0, 0, taking(slot), SnapshotReader())
                assert_not_ready(slot, step)
                slot.unlock()
        recovers(link, slot, 9)


def damaged_document(directory: Path) -> None:
    """Found by its owner, before anything else is sent."""
    with linked() as link, slot_of(directory, CAPACITY) as slot:
        for step, name in enumerate(("layout", "table", "snapshot"), 1):
            if rank() == 0:
                header = seal(slot, step, 0)
                flip(slot, sum(header.documents[name][:2]) - 1)
                with pytest.raises(CorruptData, match=f"{name} at"):
                    send_slot(link, 1, slot, header)
            if rank() == 1:
                offered: list[SlotHeader] = []
                with pytest.raises(CorruptData, match=f"rank 0 says: .*{name} at"):
                    receive_slot(link, 0, 0, taking(slot, offered), SnapshotReader())
                assert not offered
        recovers(link, slot, 9)


class Flips(Link):
    """Damages the documents on their way: what TCP's checksum does not find."""

    @override
    def send(self, to: int, buffer: memoryview, tag: int) -> None:
        if PAGE_BYTES != len(buffer) < CHUNK_BYTES:
            buffer = memoryview(bytearray(buffer))
            buffer[-1] ^= 1
        super().send(to, buffer, tag)


def document_damaged_on_the_way(directory: Path) -> None:
    with linked(Flips) as link, slot_of(directory, CAPACITY) as slot:
        if rank() == 0:
            with pytest.raises(CorruptData, match=r"rank 1 says: .*snapshot of .* changed on the way"):
                send_slot(link, 1, slot, seal(slot, 1, 0))
        if rank() == 1:
            with pytest.raises(CorruptData, match=r"snapshot of .* changed on the way"):
                receive_slot(link, 0, 0, taking(slot), SnapshotReader())
            assert_not_ready(slot, 1)


def withdrawn(directory: Path) -> None:
    with linked() as link, slot_of(directory, CAPACITY) as slot:
        if rank() == 0:
            withdraw(link, 1, 0, "step 1 was torn")
        if rank() == 1:
            offered: list[SlotHeader] = []
            with pytest.raises(ReplicationFailed, match="rank 0 says: step 1 was torn"):
                receive_slot(link, 0, 0, taking(slot, offered), SnapshotReader())
            assert not offered
        recovers(link, slot, 9)


def no_room(directory: Path) -> None:
    with linked() as link, slot_of(directory, CAPACITY) as slot, slot_of(directory, PAGE_BYTES) as small:
        if rank() == 0:
            header = seal(slot, 1, 0)
            with pytest.raises(PeerRefused, match="rank 1 says: /dev/shm is full"):
                send_slot(link, 1, slot, header)
            with pytest.raises(PeerRefused, match=r"a body of [\d,]+ bytes in a slot for 4,096"):
                send_slot(link, 1, slot, header)
            assert slot.read_header() == header
        if rank() == 1:

            def refuse(header: SlotHeader) -> Slot:
                raise NoRoom("/dev/shm is full")

            before = small.path.read_bytes()
            for take in (refuse, taking(small)):
                with pytest.raises(NoRoom):
                    receive_slot(link, 0, 0, take, SnapshotReader())
            assert small.path.read_bytes() == before
        recovers(link, slot, 9)


class Overwrites(Link):
    """The sender begins its next snapshot when all of the body but its last piece is sent."""

    slot: Slot

    @override
    def send(self, to: int, buffer: memoryview, tag: int) -> None:
        if len(buffer) > CHUNK_BYTES:
            most = len(buffer) // CHUNK_BYTES * CHUNK_BYTES
            super().send(to, buffer[:most], tag)
            seal(self.slot, 2, 0)
            super().send(to, buffer[most:], tag)
        else:
            super().send(to, buffer, tag)


def overwritten(directory: Path) -> None:
    with linked(Overwrites) as link, slot_of(directory, CAPACITY) as slot:
        assert isinstance(link, Overwrites)
        link.slot = slot
        if rank() == 0:
            with pytest.raises(ReplicationFailed, match="was overwritten while it was sent"):
                send_slot(link, 1, slot, seal(slot, 1, 0))
            assert slot.read_header().ready
        if rank() == 1:
            with pytest.raises(ReplicationFailed, match=r"rank 0 says: .*was overwritten while it was sent"):
                receive_slot(link, 0, 0, taking(slot), SnapshotReader())
            assert_not_ready(slot, 1)
        assert not link.broken


def hostile_offers(directory: Path) -> None:
    """Refused for their form, before anybody asks for room."""
    with linked() as link, slot_of(directory, CAPACITY) as slot:
        header = seal(slot, 1, 0)
        end = PAGE_BYTES + header.body_nbytes
        offers = {
            "expected rank 0 and ready": replace(header, rank=2),
            "rank 0 \\(3\\), expected rank 0 and ready": replace(header, sequence=3),
            "rank 0 \\(0\\), expected rank 0 and ready": replace(header, sequence=0),
            "table is at": replace(header, documents={"table": (end + 1, 5, "0" * 32)}),
            "layout is at": replace(header, documents={"layout": (PAGE_BYTES, 5, "0" * 32)}),
            "bytes of documents": replace(header, documents={"table": (end, MAX_DOCUMENTS_BYTES + 1, "0" * 32)}),
            "bytes of documents,": replace(header, documents={"table": (end, 2**39, "0" * 32)}),
        }
        pages = {what: memoryview(offer.encode()) for what, offer in offers.items()}
        pages["is not a document of ckptlib"] = memoryview(b"{".ljust(PAGE_BYTES, b"\0"))
        pages["does not match its digest"] = memoryview(header.encode().replace(ROOT_ID.encode(), b"f" * 32))
        for what, page in pages.items():
            if rank() == 0:
                link.send(1, page, 0)
                answer = bytearray(PAGE_BYTES)
                link.recv(1, memoryview(answer), 1)
                assert answer[0] == 2, "refused"
            if rank() == 1:
                offered: list[SlotHeader] = []
                with pytest.raises((FormatError, CorruptData), match=what):
                    receive_slot(link, 0, 0, taking(slot, offered), SnapshotReader())
                assert not offered
                assert slot.read_header() == header, "nothing has happened to what was there"
        if rank() == 0:
            link.send(1, memoryview(b"\xff" * PAGE_BYTES), 0)
        if rank() == 1:
            with pytest.raises(FormatError, match="rank 0 says"):
                receive_slot(link, 0, 0, taking(slot), SnapshotReader())
        # a snapshot that says of itself what cannot be: only its own documents are consulted, and its slot stays void
        if rank() == 0:
            lying = replace(header, documents=slot.write_documents(header.body_nbytes, {"layout": b"x" * 10}))
            slot.write_header(lying)
            with pytest.raises(CorruptData, match="holds no table"):
                send_slot(link, 1, slot, lying)
        if rank() == 1:
            with pytest.raises(FormatError, match="holds no table"):
                receive_slot(link, 0, 0, taking(slot), SnapshotReader())
            assert_not_ready(slot, 1)
        recovers(link, slot, 9)


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
    world = dist.group.WORLD
    assert world is not None
    link = Dies(world, PATIENCE)
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
    damaged_body,
    damaged_document,
    document_damaged_on_the_way,
    withdrawn,
    no_room,
    overwritten,
    hostile_offers,
    nobody_comes,
    killed,
]


def main() -> None:
    directory = Path(sys.argv[2])
    faulthandler.dump_traceback_later(float(sys.argv[3]), exit=True)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=int(sys.argv[1]), world_size=NUM_RANKS, timeout=PATIENCE
    )
    warnings.simplefilter("error")
    link_module.CHUNK_BYTES = CHUNK_BYTES
    for case in CASES:
        here = directory / case.__name__
        here.mkdir(exist_ok=True)
        verdict = directory / f"{case.__name__}.rank{rank()}"
        try:
            case(here)
            verdict.write_text("ok")
        except (Exception, pytest.fail.Exception) as error:
            verdict.write_text("".join(traceback.format_exception(error)))
            os._exit(1)
        if case is not killed:
            dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that ends in the ordinary way (torch 2.13)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
