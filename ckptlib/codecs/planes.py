"""Codec "planes": encodes floats by planes of bits, losslessly.

Exponents of weights and moments are far from evenly spread: zstd's Huffman code takes them to 2 to 3 bits, after
subtracting the levels of rows and columns if a sample says that it helps. Signs and mantissas are noise, and stay as
they are, unless a sample says otherwise. A frame is

    kind u8, row u16, first u16
    per block of 262,144 elements:
        model u8, then planes: [levels of rows, [of columns,]] exponents, mantissas, low
    the bytes behind the last whole element

A plane is as `plane_frames` describes it, and the numbers of elements follow from the number of bytes to decode to.
Blocks are independent, and the planes of one fit into the cache of a core; so memory is bounded, however large the
chunk.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import ClassVar

import numpy as np
from typing_extensions import override

from ckptlib.codecs import sample
from ckptlib.codecs.codec import Codec, Content
from ckptlib.codecs.float_bits import BY_CODE, KINDS, Bytes, Cutter, Kind
from ckptlib.codecs.levels import MAX_ROW, MIN_ROW, NO_COLUMNS, Leveller, Levels, Model, row_bytes, row_of
from ckptlib.codecs.pairs import Pairer
from ckptlib.codecs.plane_frames import FrameReader, Parts, coded, paired, stored, without_lowest_bit
from ckptlib.codecs.sample import Way
from ckptlib.codecs.zstd import WORTH
from ckptlib.errors import FormatError

BLOCK = 1 << 18
"""Elements in a block. Twice what zstd codes with one table; with fewer, the levels of columns weigh more."""
_HEAD = struct.Struct("<BHH")
_SMALLEST = 256
"""Bytes; smaller chunks save less than examining them costs."""


_WAYS = {Way.AS_IS: stored, Way.CODED: coded, Way.WITHOUT_LOWEST_BIT: without_lowest_bit}


_turn = threading.Lock()
"""Held by the thread that decodes. Several at once would be slower than one: numpy's operations end sooner than threads
hand over the interpreter's lock. So decoders wait here, and leave the lock to threads that read and digest."""


def _renew_turn() -> None:
    """Renews the lock in a forked child, whose one thread would wait for ever if another one held it."""
    global _turn
    _turn = threading.Lock()


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=_renew_turn)


class _Work(threading.local):
    """Memory that a thread computes in, 2 MB; kept, since fresh memory costs more than the work."""

    def __init__(self) -> None:
        self.cutter, self.leveller, self.pairer = Cutter(BLOCK), Leveller(BLOCK), Pairer(BLOCK)


class Planes(Codec):
    """Encodes floats. Leaves chunks of anything else raw."""

    name: ClassVar[str] = "planes"

    def __init__(self) -> None:
        self._encoding, self._decoding = _Work(), _Work()
        """Apart, so that a decoder does not find in its memory what the frame ought to hold."""

    @override
    def encode(self, raw: memoryview, content: Content) -> bytes | None:
        kind = KINDS.get(content.dtype)
        if kind is None or len(raw) < _SMALLEST:
            return None
        work = self._encoding
        items = np.frombuffer(raw, np.uint8, len(raw) // kind.itemsize * kind.itemsize)
        row = row_of(content.row) if kind.itemsize > 1 else 0
        first = content.first % row if row else 0
        plan = sample.plan(kind, items, first, row, min(BLOCK, len(items) // kind.itemsize), work.cutter)
        if not plan.pays:
            return None
        found: Parts = [_HEAD.pack(kind.code, row, first)]
        for at in range(0, len(items), BLOCK * kind.itemsize):
            block = items[at : at + BLOCK * kind.itemsize]
            place = (first + at // kind.itemsize) % row if row else 0
            found += _encode_block(work, kind, plan, block, place, row)
        found.append(raw[len(items) :])
        frame = b"".join(found)
        return frame if len(frame) <= WORTH * len(raw) else None

    @override
    def decode(self, frame: memoryview, out: memoryview) -> None:
        with _turn:
            _decode(self._decoding, FrameReader(frame), out)


def _encode_block(work: _Work, kind: Kind, plan: sample.Plan, block: Bytes, first: int, row: int) -> Parts:
    count = len(block) // kind.itemsize
    exponents = work.leveller.memory(first, count)
    mantissas, low = (np.empty(count * size, np.uint8) for size in (kind.mantissa_bytes, kind.low_bytes))
    work.cutter.cut(kind, block, exponents, mantissas, low)
    found: Parts = [bytes([plan.model])]
    if plan.model is not Model.NONE:
        levels = work.leveller.take_off(first, count, row, plan.model)
        found += coded(levels.rows)
        if plan.model is Model.ROWS_AND_COLUMNS:
            found += coded(levels.columns)
    of_exponents = paired(exponents, work.pairer) if plan.exponents is Way.CODED else stored(exponents)
    found += [bytes(part) for part in of_exponents]  # the exponents' own memory serves the next block
    return found + _WAYS[plan.mantissas](mantissas) + _WAYS[plan.low](low)


def _decode(work: _Work, reader: FrameReader, out: memoryview) -> None:
    code, row, first = _HEAD.unpack(reader.take(_HEAD.size, "its head"))
    kind = BY_CODE.get(code)
    if kind is None or not (row == 0 or MIN_ROW <= row <= MAX_ROW) or first >= max(row, 1):
        raise FormatError(f"a frame of planes begins with kind {code}, row {row}, first {first}: no such frame")
    items = np.frombuffer(out, np.uint8, len(out) // kind.itemsize * kind.itemsize)
    for at in range(0, len(items), BLOCK * kind.itemsize):
        block = items[at : at + BLOCK * kind.itemsize]
        place = (first + at // kind.itemsize) % row if row else 0
        _decode_block(work, kind, reader, block, place, row)
    out[len(items) :] = reader.take(len(out) - len(items), "the bytes behind the last element")
    reader.end()


def _decode_block(work: _Work, kind: Kind, reader: FrameReader, block: Bytes, first: int, row: int) -> None:
    count = len(block) // kind.itemsize
    levels = _read_levels(reader, first, count, row)
    exponents = work.leveller.memory(first, count)
    reader.plane_into(exponents, work.pairer, "exponents")
    mantissas = reader.plane(count * kind.mantissa_bytes, "mantissas")
    low = reader.plane(count * kind.low_bytes, "low bytes")
    if levels is not None:
        work.leveller.put_on(first, count, row, levels)
    work.cutter.join(kind, exponents, mantissas, low, block)


def _read_levels(reader: FrameReader, first: int, count: int, row: int) -> Levels | None:
    (model,) = reader.take(1, "which levels were taken off")
    if model == Model.NONE:
        return None
    if model not in (Model.ROWS, Model.ROWS_AND_COLUMNS) or not row:
        raise FormatError(f"a frame says {model} of the levels of its rows of {row}: no such levels")
    rows = reader.plane(row_bytes(first, count, row, Model(model)), "levels of rows")
    if model == Model.ROWS:
        return Levels(rows, NO_COLUMNS)
    return Levels(rows, reader.plane(row, "levels of columns"))
