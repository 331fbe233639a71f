"""Increments: the step of an optimizer from one snapshot to the next, from a rank to a holder of the one before.

    sender                            receiver
                                 <--  with what it lacks: its base, the snapshot of this rank that it sealed last
    plan: the shards of each     -->  parameters of which it has all in both slots?
    parameter that fits          <--  go on, or why not; then everything goes as it is
    for each stretch of those:   -->  decodes it into the slot, with the help of its base, while the next one arrives
    a head, a frame

All the rest then goes as it is, and every chunk is checked against its digest, whichever way it came. A base is the
same on both sides if the digests of its headers are, which have the digests of all else. What a peer sends is hostile.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np

from ckptlib.codecs.bit_residuals import Words, flushes_denormals
from ckptlib.codecs.optimizer_step import MAX_ELEMENTS
from ckptlib.errors import FormatError
from ckptlib.format.body_layout import ALIGN_FROM_BYTES
from ckptlib.format.digests import XXH3, digester
from ckptlib.jobs import Given, JobThread, Result, fulfil
from ckptlib.pages import round_up
from ckptlib.peers.parameters import Span
from ckptlib.peers.ranges import ByteRange, Ranges, joined, without
from ckptlib.ranks.link import Link
from ckptlib.slots.header import SlotHeader
from ckptlib.slots.slot import Slot

STRETCH = MAX_ELEMENTS
"""Elements in a frame: 3 MiB of AdamW's state, so that encoding, sending and decoding overlap from 10 MiB on."""

IN_FLIGHT = 2
"""Frames on their way while the next one is encoded."""

MAX_PLAN_BYTES = 1 << 26

HEAD = struct.Struct("<BI")
"""How the frame is coded, and how many bytes it has."""
RAW, STEP = range(2)


class Base(NamedTuple):
    """A snapshot that both sides may have."""

    identity: str
    flushes: bool
    """Whether the holder treats denormals as zeros."""

    @classmethod
    def of(cls, header: SlotHeader) -> Base:
        return cls(digester(XXH3)(header.encode()), flushes_denormals())

    @classmethod
    def decode(cls, data: object, who: str) -> Base | None:
        """Returns the base that a peer names. Raises FormatError."""
        match data:
            case None:
                return None
            case [str(identity), bool(flushes)]:
                return cls(identity, flushes)
        raise FormatError(f"{who} names no base of increments, but: {str(data)[:80]}")


class Stretch(NamedTuple):
    """Some elements of the state of a parameter."""

    spans: tuple[Span, ...]
    start: int
    stop: int

    def words(self, slot: Slot) -> list[Words]:
        """Returns the elements in the body of a slot, as they lie there."""
        found: list[Any] = []
        for span in self.spans:
            part = slot.body[span.offset + self.start * span.itemsize : span.offset + self.stop * span.itemsize]
            found.append(np.frombuffer(part, np.uint32 if span.itemsize == 4 else np.uint16))
        return found

    @property
    def nbytes(self) -> int:
        return sum((self.stop - self.start) * span.itemsize for span in self.spans)


def stretches(states: Sequence[tuple[Span, ...]]) -> Iterator[Stretch]:
    """Yields the stretches of these parameters, one after the other."""
    for spans in states:
        count = spans[0].nbytes // spans[0].itemsize
        for start in range(0, count, STRETCH):
            yield Stretch(spans, start, min(start + STRETCH, count))


def are_lacking(spans: Iterable[Span], lacking: Ranges) -> bool:
    """Returns whether all of each span is lacking."""
    return all(any(a <= span.offset and span.end <= b for a, b in lacking) for span in spans)


def beside(lacking: Ranges, states: Collection[tuple[Span, ...]]) -> Ranges:
    """Returns the ranges that are still lacking once the state of these has come; MAX_RANGES at most."""
    # nothing lies between the end of a large shard and the next page
    ends = {
        span.offset: round_up(span.end) if span.nbytes >= ALIGN_FROM_BYTES else span.end for s in states for span in s
    }
    return joined(without(lacking, starmap(ByteRange, ends.items())))


def send_increments(link: Link, to: int, tag: int, frames: Iterator[tuple[bytes, bytes]]) -> int:
    """Encodes each frame while those before are on their way. Returns the bytes sent. Raises AgreementFailed."""
    under_way: deque[Callable[[], None]] = deque()
    sent = 0
    # in a separate thread: gloo's sends wait while gloo's own thread hands bytes to the kernel
    with _thread_for("encode", lambda: next(frames, None)) as encode:
        coming = encode()
        try:
            while (pair := coming.result()) is not None:
                coming = encode()
                while len(under_way) >= 2 * IN_FLIGHT:
                    under_way.popleft()()
                under_way.extend(link.begin_send(to, memoryview(part), tag) for part in pair)
                sent += sum(map(len, pair))
        finally:
            while under_way:  # gloo reads them until then
                under_way.popleft()()
    return sent


def receive_increments(
    link: Link, frm: int, tag: int, expected: Sequence[Stretch], decode: Callable[[int, memoryview, Stretch], None]
) -> FormatError | None:
    """Decodes each increment while the next is on its way. Returns the first problem, once all have come.

    Raises AgreementFailed.
    """
    damage: FormatError | None = None
    heads = [bytearray(HEAD.size) for _ in range(2)]
    coming = link.begin_recv(frm, memoryview(heads[0]), tag) if expected else None
    decoding: Future[FormatError | None] | None = None
    with _thread_for("decode", partial(_try, decode)) as begin:
        for n, stretch in enumerate(expected):
            assert coming is not None
            coming()
            how, nbytes = HEAD.unpack(heads[n % 2])
            if not 0 < nbytes <= stretch.nbytes:
                raise link.give_up(frm, f"it announces {nbytes:,} bytes for an increment of {stretch.nbytes:,}")
            frame = np.empty(nbytes, np.uint8).data
            arrives = link.begin_recv(frm, frame, tag)
            if n + 1 < len(expected):
                coming = link.begin_recv(frm, memoryview(heads[(n + 1) % 2]), tag)
            arrives()
            damage = damage or (None if decoding is None else decoding.result())
            decoding = None if damage else begin(how, frame, stretch)
    return damage or (None if decoding is None else decoding.result())


@contextmanager
def _thread_for(name: str, call: Callable[Given, Result]) -> Iterator[Callable[Given, Future[Result]]]:
    """Yields a function that has a thread make this call. Returns when all of the calls have ended.

    If the system has no thread more, whoever asks makes the call: to give up here would leave the other rank in the
    middle of a transfer.
    """
    thread = JobThread(name)

    def begin(*args: Given.args, **kwargs: Given.kwargs) -> Future[Result]:
        future: Future[Result] = Future()
        job = partial(fulfil, future, partial(call, *args, **kwargs))
        try:
            thread.put(job)
        except RuntimeError:
            job()
        return future

    try:
        yield begin
    finally:
        thread.finish()


def _try(
    decode: Callable[[int, memoryview, Stretch], None], how: int, frame: memoryview, stretch: Stretch
) -> FormatError | None:
    try:
        decode(how, frame, stretch)
    except FormatError as error:
        return error
    return None
