"""One snapshot's way from a slot into a slot of another rank: byte by byte the same, and checked before it counts.

    sender                            receiver
    offer: the header's page     -->  takes a slot with room, and marks its content as being written
                                 <--  verdict: go on, or why not
    documents, body              -->  straight into the slot; each chunk's digest is checked while later ones arrive
    verdict: still the same      -->  all of it checked? then the header, which makes it ready
                                 <--  verdict: sealed, or what is wrong

A crash, a lost peer or damage at any point leaves the receiver's slot as it is while it is written: not ready. What a
peer sends is hostile until checked. The same number of messages whatever a snapshot holds; none per tensor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

from ckptlib.errors import AgreementFailed, CkptError, CorruptData, FormatError, NoRoom, PeerRefused, ReplicationFailed
from ckptlib.peer.link import Link
from ckptlib.slot import PAGE_BYTES, Slot, SlotHeader
from ckptlib.snapshot import SnapshotReader, check_body

MAX_DOCUMENTS_BYTES = 2**30
"""Of all documents of a snapshot; a peer that offers more is not believed."""

_GOOD, _DAMAGED, _REFUSED, _FAILED = range(4)
_ERRORS: dict[int, type[CkptError]] = {_DAMAGED: CorruptData, _REFUSED: PeerRefused, _FAILED: ReplicationFailed}
_VERDICT = struct.Struct(f"<II{PAGE_BYTES - 8}s")
"""One of the above, and why: so many bytes of UTF-8. Never begins as a header does."""


def send_slot(link: Link, to: int, slot: Slot, header: SlotHeader) -> None:
    """Returns when the peer holds a sealed replica of the snapshot that has this `header`.

    The caller sees to it that nobody overwrites the slot meanwhile; were it done all the same, the replica would not
    be sealed. One transfer at a time for each pair of ranks and `header.rank`.

    Raises PeerRefused; CorruptData when what came did not match its digests; ReplicationFailed for the rest that leaves
    both ranks whole; AgreementFailed when the peer is gone.
    """
    data, answer = _tags(header.rank)
    try:
        documents = b"".join(slot.read_document(header, name) for name in header.documents)
    except CkptError as error:
        _tell(link, to, data, _DAMAGED, str(error))
        raise
    link.send(to, memoryview(header.encode()), data)
    _hear(link, to, answer)
    link.send(to, memoryview(documents), data)
    link.send(to, slot.body[: header.body_nbytes], data)
    if slot.read_header() != header:
        why = f"{slot.path}: {header.save} was overwritten while it was sent"
        _tell(link, to, data, _FAILED, why)
        raise ReplicationFailed(why)
    _tell(link, to, data, _GOOD)
    _hear(link, to, answer)


def withdraw(link: Link, to: int, origin: int, why: str) -> None:
    """Tells a peer that waits for a snapshot of rank `origin` that none will come. Raises AgreementFailed."""
    _tell(link, to, _tags(origin)[0], _FAILED, why)


def receive_slot(
    link: Link, frm: int, origin: int, take: Callable[[SlotHeader], Slot], snapshots: SnapshotReader
) -> SlotHeader:
    """The header of a snapshot of rank `origin` that `frm` has sent, and that is sealed in a slot here now.

    `take` gives a slot for it, locked for writing and with room, which stays the caller's; or raises what it has
    against this snapshot (its root, its generation, its size: nothing but its form was looked at before), or NoRoom.

    Raises what `take` raised; CorruptData or FormatError for what does not match its digests; ReplicationFailed when
    the sender gave up; AgreementFailed when it is gone. The slot is not ready then, if it was taken.
    """
    data, answer = _tags(origin)
    page = _receive_page(link, frm, data)
    if not page.startswith(b"{"):
        _heed(page, link.global_rank(frm))
    try:
        header = _offered(page, f"offer of rank {link.global_rank(frm)}", origin)
        slot = take(header)
        if header.body_nbytes > slot.capacity:
            raise NoRoom(f"{slot.path}: a body of {header.body_nbytes:,} bytes in a slot for {slot.capacity:,}")
    except CkptError as error:
        _tell(link, frm, answer, _REFUSED, str(error))
        raise
    slot.write_header(replace(header, sequence=header.sequence - 1))
    _tell(link, frm, answer, _GOOD)
    damage = _receive_content(link, frm, data, slot, header, snapshots)
    _hear(link, frm, data)
    if damage is not None:
        _tell(link, frm, answer, _REFUSED if isinstance(damage, NoRoom) else _DAMAGED, str(damage))
        raise damage
    slot.write_header(header)
    _tell(link, frm, answer, _GOOD)
    return header


def _offered(page: bytes, where: str, origin: int) -> SlotHeader:
    """The header in it: of a ready snapshot of `origin`, its documents in order behind its body."""
    header = SlotHeader.decode(page, where)
    if header.rank != origin or not header.ready or header.sequence == 0:
        raise FormatError(f"{where}: rank {header.rank} ({header.sequence}), expected rank {origin} and ready")
    end = behind = PAGE_BYTES + header.body_nbytes
    for name, (offset, nbytes, _) in header.documents.items():
        if offset != end:
            raise FormatError(f"{where}: {name} is at {offset}, expected {end}")
        end += nbytes
    if end - behind > MAX_DOCUMENTS_BYTES:
        raise FormatError(f"{where}: {end - behind:,} bytes of documents, expected at most {MAX_DOCUMENTS_BYTES:,}")
    return header


def _receive_content(
    link: Link, frm: int, tag: int, slot: Slot, header: SlotHeader, snapshots: SnapshotReader
) -> CkptError | None:
    """What is wrong with it, if anything. All that was sent has been received then, good or not."""
    documents = bytearray(sum(nbytes for _, nbytes, _ in header.documents.values()))
    link.recv(frm, memoryview(documents), tag)
    arriving = link.arriving(frm, slot.body[: header.body_nbytes], tag)
    damage = None
    try:
        _put_documents(slot, header, bytes(documents))
        check_body(slot, snapshots.read(slot, header), arriving)
    except AgreementFailed:
        raise
    except CkptError as error:
        damage = error
    for _ in arriving:
        pass
    return damage


def _put_documents(slot: Slot, header: SlotHeader, data: bytes) -> None:
    """Raises CorruptData unless they are what the header says; NoRoom."""
    documents, at = {}, 0
    for name, (_, nbytes, _) in header.documents.items():
        documents[name] = data[at : at + nbytes]
        at += nbytes
    places = slot.write_documents(header.body_nbytes, documents)
    damaged = [name for name, place in places.items() if place != header.documents[name]]
    if damaged:
        raise CorruptData(f"{slot.path}: {', '.join(damaged)} of {header.save} changed on the way from a peer")


def _tags(origin: int) -> tuple[int, int]:
    """Of what goes to the receiver of this rank's snapshots, and of its answers."""
    return 2 * origin, 2 * origin + 1


def _tell(link: Link, to: int, tag: int, verdict: int, why: str = "") -> None:
    text = why.encode()[: PAGE_BYTES - 8]
    link.send(to, memoryview(_VERDICT.pack(verdict, len(text), text)), tag)


def _hear(link: Link, frm: int, tag: int) -> None:
    _heed(_receive_page(link, frm, tag), link.global_rank(frm))


def _heed(page: bytes, peer: int) -> None:
    """Raises what a verdict says, unless that is good."""
    verdict, nbytes, text = _VERDICT.unpack(page)
    if verdict != _GOOD:
        raise _ERRORS.get(verdict, FormatError)(f"rank {peer} says: {text[:nbytes].decode(errors='replace')}")


def _receive_page(link: Link, frm: int, tag: int) -> bytes:
    page = bytearray(PAGE_BYTES)
    link.recv(frm, memoryview(page), tag)
    return bytes(page)
