"""One snapshot's way from a slot into a slot of another rank: byte by byte the same, and checked before it counts.

    sender                            receiver
    offer: the header's page     -->  takes a slot with room, and marks its content as being written
                                 <--  verdict: go on, with the ranges of the body that it lacks, or why not
    documents                    -->
    increments, if both have     -->  see `increments`: some of these ranges, in fewer bytes
    the snapshot before
    those ranges                 -->  straight into the slot; each chunk's digest is checked while later ones arrive
    verdict: still the same      -->  all of it checked? then the header, which makes it ready
                                 <--  verdict: sealed, or what is wrong

A crash, a lost peer or damage at any point leaves the receiver's slot as it is while it is written: not ready. What a
peer sends is hostile until checked. The number of messages is the same whatever a snapshot holds; none is per tensor.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ckptlib.errors import AgreementFailed, CkptError, CorruptData, FormatError, NoRoom, PeerRefused, ReplicationFailed
from ckptlib.pages import PAGE_BYTES
from ckptlib.peers.increment_receiver import StepReceiver
from ckptlib.peers.increment_sender import StepSender
from ckptlib.peers.increments import (
    MAX_PLAN_BYTES,
    Base,
    beside,
    receive_increments,
    send_increments,
    stretches,
)
from ckptlib.peers.parameters import Span
from ckptlib.peers.ranges import ByteRange, Ranges, everything, joined
from ckptlib.ranks.link import Link
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot
from ckptlib.slots.snapshot import Snapshot, SnapshotReader, check_body

log = logging.getLogger(__name__)

MAX_DOCUMENTS_BYTES = 2**30
"""Most bytes of all documents of a snapshot; a peer that offers more is not believed."""

_GOOD, _DAMAGED, _REFUSED, _FAILED = range(4)
_ERRORS: dict[int, type[CkptError]] = {_DAMAGED: CorruptData, _REFUSED: PeerRefused, _FAILED: ReplicationFailed}
_VERDICT = struct.Struct(f"<II{PAGE_BYTES - 8}s")
"""One of the above; the length of a text, and the text in UTF-8: why, or the ranges that are lacking. Never begins as a
header does."""


def send_slot(link: Link, to: int, slot: Slot, header: SlotHeader, steps: StepSender | None = None) -> int:
    """Sends a snapshot. Once the peer holds a sealed replica of the snapshot that has this `header`, returns how many
    bytes were sent of the body, or in their place. `steps`: what that peer was sent before, if increments may be sent.

    The caller sees to it that nobody overwrites the slot meanwhile; if somebody did all the same, the replica would not
    be sealed. One transfer at a time for each pair of ranks and `header.rank`.

    Raises PeerRefused; CorruptData when what came did not match its digests; ReplicationFailed for other failures that
    leave both ranks whole; AgreementFailed when the peer is gone.
    """
    data, answer = _tags(header.rank)
    try:
        documents = b"".join(slot.read_document(header, name) for name in header.documents)
        if steps is not None:
            steps.offer(slot, header)
    except CkptError as error:
        _tell(link, to, data, _DAMAGED, str(error))
        raise
    link.send(to, memoryview(header.encode()), data)
    lacking, base = _asked(_hear(link, to, answer), header.body_nbytes, f"rank {link.global_rank(to)}")
    link.send(to, memoryview(documents), data)
    sent = 0
    if steps is not None:
        sent, lacking = _send_steps(link, to, _tags(header.rank), steps, lacking, base)
    for start, end in lacking:
        link.send(to, slot.body[start:end], data)
        sent += end - start
    if slot.read_header() != header or (steps is not None and steps.coded and not steps.intact()):
        why = f"{slot.path}: {header.save}, or what it was compared with, was overwritten while it was sent"
        _tell(link, to, data, _FAILED, why)
        raise ReplicationFailed(why)
    _tell(link, to, data, _GOOD)
    _hear(link, to, answer)
    if steps is not None:
        steps.sealed()
    return sent


def _send_steps(
    link: Link, to: int, tags: _Tags, steps: StepSender, lacking: Ranges, base: Base | None
) -> tuple[int, Ranges]:
    """Sends increments; returns the bytes sent, and the ranges still lacking. Without a base, the peer expects none."""
    updates = steps.plan(lacking, base)
    if base is None:
        return 0, lacking
    plan = json.dumps([[span.shard for span in parameter.spans] for parameter, _ in updates]).encode()
    _tell(link, to, tags.data, _GOOD, str(len(plan)))
    link.send(to, memoryview(plan), tags.data)
    refusal = _hear(link, to, tags.answer)
    if refusal:
        log.warning("increments for rank %d: %s", link.global_rank(to), refusal)
        steps.refused(updates)
        return 0, lacking
    sent = send_increments(link, to, tags.data, steps.frames(updates))
    return sent, beside(lacking, [parameter.spans for parameter, _ in updates])


def withdraw(link: Link, to: int, origin: int, why: str) -> None:
    """Tells a peer that waits for a snapshot of rank `origin` that none will come. Raises AgreementFailed."""
    _tell(link, to, _tags(origin).data, _FAILED, why)


def receive_slot(
    link: Link,
    frm: int,
    origin: int,
    take: Callable[[SlotHeader], Slot],
    snapshots: SnapshotReader,
    lacks: Callable[[SlotHeader], Ranges] = everything,
    steps: StepReceiver | None = None,
    on_sealed: Callable[[], None] = lambda: None,
) -> SlotHeader:
    """Receives a snapshot of rank `origin` from `frm`; returns its header when it is sealed in a slot here.

    `take` returns a slot for it, locked for writing and with room, which stays the caller's; or raises what it has
    against this snapshot (its root, its generation, its size: nothing but its form was looked at before), or NoRoom.
    After it, `lacks` returns which ranges of the body are to be sent: the rest is in the slot, or is between chunks.
    `steps`: what this rank has of `origin`, if increments may be sent. `on_sealed` is called before the peer is told.

    Raises what `take` raised; CorruptData or FormatError for what does not match its digests; ReplicationFailed when
    the sender gave up; AgreementFailed when it is gone. The slot, if it was taken, is not ready then, unless
    `on_sealed` was called: the peer may count on it then.
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
        lacking = joined(lacks(header))
        slot.write_header(replace(header, sequence=header.sequence - 1))
    except CkptError as error:
        _tell(link, frm, answer, _REFUSED, str(error))
        raise
    base = None if steps is None else steps.offer(header)
    _tell(link, frm, answer, _GOOD, json.dumps([lacking, base]))
    increments = None if steps is None or base is None else steps
    damage = _receive_content(link, frm, slot, header, snapshots, lacking, increments)
    _hear(link, frm, data)
    if damage is None:
        try:
            slot.write_header(header)
        except NoRoom as error:
            damage = error
    if damage is not None:
        _tell(link, frm, answer, _REFUSED if isinstance(damage, NoRoom) else _DAMAGED, str(damage))
        raise damage
    if steps is not None:
        steps.sealed(slot, header)
    on_sealed()
    _tell(link, frm, answer, _GOOD)
    return header


def _offered(page: bytes, where: str, origin: int) -> SlotHeader:
    """Returns the header in an offer: of a ready snapshot of `origin`, with its documents in order behind its body."""
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


def _asked(text: str, body_nbytes: int, who: str) -> tuple[Ranges, Base | None]:
    """Returns the ranges that a peer lacks, and the base that it has. Raises FormatError."""
    try:
        lacking, base = json.loads(text)
        ranges = [ByteRange(int(start), int(end)) for start, end in lacking]
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{who} asks for no ranges of a snapshot, but: {text[:80]}") from error
    at = 0
    for start, end in ranges:
        if not at <= start < end <= body_nbytes:
            raise FormatError(f"{who} asks for [{start}, {end}) of a body of {body_nbytes:,} bytes")
        at = end
    return ranges, Base.decode(base, who)


def _arriving(link: Link, frm: int, tag: int, slot: Slot, lacking: Ranges) -> Iterator[int]:
    """Yields how many of the body's first bytes are there, each time that there are more."""
    for start, end in lacking:
        yield start
        for count in link.arriving(frm, slot.body[start:end], tag):
            yield start + count


def _receive_content(
    link: Link,
    frm: int,
    slot: Slot,
    header: SlotHeader,
    snapshots: SnapshotReader,
    lacking: Ranges,
    steps: StepReceiver | None,
) -> CkptError | None:
    """Receives documents and body. Returns the problem with them, if any; all that was sent has been received then,
    good or not.

    `steps`: None if no increments come.
    """
    tags = _tags(header.rank)
    documents = bytearray(sum(nbytes for _, nbytes, _ in header.documents.values()))
    link.recv(frm, memoryview(documents), tags.data)
    snapshot: Snapshot | None = None
    damage: CkptError | None = None
    try:
        _put_documents(slot, header, bytes(documents))
        snapshot = snapshots.read(slot, header)
    except CkptError as error:
        damage = error
    if steps is not None:
        wrong, lacking = _receive_steps(link, frm, tags, steps, slot, snapshot, lacking)
        damage = damage or wrong
    arriving = _arriving(link, frm, tags.data, slot, lacking)
    try:
        if snapshot is not None and damage is None:
            check_body(slot, snapshot, arriving)
    except AgreementFailed:
        raise
    except CorruptData as error:  # here, there, or on its way: checksums of TCP miss one of 65,536
        damage = CorruptData(f"{error}, that of the host that sent it, and the network")
    except CkptError as error:
        damage = error
    for _ in arriving:
        pass
    return damage


def _receive_steps(
    link: Link, frm: int, tags: _Tags, steps: StepReceiver, slot: Slot, snapshot: Snapshot | None, lacking: Ranges
) -> tuple[CkptError | None, Ranges]:
    """Receives increments. Returns the problem with one, if any, and the ranges still lacking."""
    text = _hear(link, frm, tags.data)
    if not (text.isascii() and text.isdigit() and 2 <= int(text) <= MAX_PLAN_BYTES):
        raise link.give_up(frm, f"it announces a plan of {text[:20]} bytes, expected up to {MAX_PLAN_BYTES:,}")
    plan = bytearray(int(text))
    link.recv(frm, memoryview(plan), tags.data)
    states: list[tuple[Span, ...]] = []
    try:
        if snapshot is None:
            raise FormatError("its documents are damaged")
        states = steps.accept(bytes(plan), snapshot, lacking)
    except FormatError as error:
        _tell(link, frm, tags.answer, _GOOD, str(error))
        return None, lacking
    _tell(link, frm, tags.answer, _GOOD)
    wrong = receive_increments(link, frm, tags.data, [*stretches(states)], partial(steps.decode, slot))
    return wrong, beside(lacking, states)


def _put_documents(slot: Slot, header: SlotHeader, data: bytes) -> None:
    """Puts the documents into a slot. Raises CorruptData unless they are what the header says; NoRoom."""
    documents, at = {}, 0
    for name, (_, nbytes, _) in header.documents.items():
        documents[name] = data[at : at + nbytes]
        at += nbytes
    places = slot.write_documents(header.body_nbytes, documents)
    damaged = [name for name, place in places.items() if place != header.documents[name]]
    if damaged:
        raise CorruptData(f"{slot.path}: {', '.join(damaged)} of {header.save} changed on the way from a peer")


class _Tags(NamedTuple):
    """Tags of messages about one rank's snapshots."""

    data: int
    """The tag of messages to their receiver."""
    answer: int
    """The tag of messages from it."""


def _tags(origin: int) -> _Tags:
    return _Tags(2 * origin, 2 * origin + 1)


def _tell(link: Link, to: int, tag: int, verdict: int, why: str = "") -> None:
    text = why.encode()[: PAGE_BYTES - 8]
    link.send(to, memoryview(_VERDICT.pack(verdict, len(text), text)), tag)


def _hear(link: Link, frm: int, tag: int) -> str:
    return _heed(_receive_page(link, frm, tag), link.global_rank(frm))


def _heed(page: bytes, peer: int) -> str:
    """Returns the details of a good verdict. Raises the error that a bad one carries."""
    verdict, nbytes, data = _VERDICT.unpack(page)
    text = str(data[:nbytes].decode(errors="replace"))
    if verdict != _GOOD:
        raise _ERRORS.get(verdict, FormatError)(f"rank {peer} says: {text}")
    return text


def _receive_page(link: Link, frm: int, tag: int) -> bytes:
    page = bytearray(PAGE_BYTES)
    link.recv(frm, memoryview(page), tag)
    return bytes(page)
