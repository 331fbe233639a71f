"""Transfers that come to nothing: damaged, withdrawn, without room, overwritten, or offered by a liar.

Cases of transfers.py. The link lives on after each of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.refused import refused_pwrite
from support import ROOT_ID
from typing_extensions import override
from workers.rank_slots import CAPACITY, STATE, assert_not_ready, flip, seal, slot_of, taking
from workers.three_ranks import linked, rank

from ckptlib.errors import CorruptData, FormatError, NoRoom, PeerRefused, ReplicationFailed
from ckptlib.pages import PAGE_BYTES
from ckptlib.peers.transfer import MAX_DOCUMENTS_BYTES, receive_slot, send_slot, withdraw
from ckptlib.ranks import link as link_module
from ckptlib.ranks.link import Link
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import SnapshotReader


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
            named = rf"{name}\[.*\] at \[\d+:\+\d+\] changed in memory after it was sealed.* and the network$"
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
        if PAGE_BYTES != len(buffer) < link_module.CHUNK_BYTES:
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
        if len(buffer) > link_module.CHUNK_BYTES:
            most = len(buffer) // link_module.CHUNK_BYTES * link_module.CHUNK_BYTES
            super().send(to, buffer[:most], tag)
            seal(self.slot, 2, 0)
            super().send(to, buffer[most:], tag)
        else:
            super().send(to, buffer, tag)


def not_written(directory: Path) -> None:
    """The disk of the receiver's slot refuses a header: that of the seal, behind three documents, or the first one."""
    with linked() as link, slot_of(directory, CAPACITY) as slot:
        for step, refused in enumerate((5, 1), 1):
            if rank() == 0:
                with pytest.raises(PeerRefused, match=r"rank 1 says: .*header cannot be written: Input/output error"):
                    send_slot(link, 1, slot, seal(slot, step, 0))
            if rank() == 1:
                with refused_pwrite(refused), pytest.raises(NoRoom, match="header cannot be written"):
                    receive_slot(link, 0, 0, taking(slot), SnapshotReader())
                assert_not_ready(slot, 1)  # of the second one nothing was written
                slot.unlock()
        recovers(link, slot, 9)


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


CASES = [
    damaged_body,
    damaged_document,
    document_damaged_on_the_way,
    withdrawn,
    no_room,
    not_written,
    overwritten,
    hostile_offers,
]
