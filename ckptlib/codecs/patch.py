"""Codec "patch": the rows of a chunk that differ from its base. For tables of which a step touches few rows.

A base is the chunk as it was last stored whole, so patches are cumulative and never chained: a load reads two objects
however many saves lie between. A frame, all numbers little-endian:

    flags u8 (1: body by zstd), width u8 (of gaps: 1, 2 or 4), 0 u16, bytes per row u32, bytes before the first row u32,
    number of stored rows u32, bytes of the chunk u64
    body: the stored rows; the chunk's edges (see `rows`), which always travel; one gap per stored row

A gap is the number of rows between a stored row and the one stored before it, or the chunk's first row. So gaps cannot
name a row twice, or out of order.
"""

from __future__ import annotations

import struct
from typing import ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from ckptlib.codecs.codec import Content, SummaryCodec
from ckptlib.codecs.row_hashes import HASH_BYTES, NUM_LANES, hash_rows
from ckptlib.codecs.rows import MIN_ROW_BYTES, Rows, cut
from ckptlib.codecs.zstd import Zstd, inflate
from ckptlib.errors import FormatError

AT_MOST = 0.98
"""Share of the chunk's bytes. A larger frame is not worth a second read at the load."""

_HEADER = struct.Struct("<BBHIIIQ")
_SUMMARY = struct.Struct("<IIQ")
_ZSTD = 1
_WIDTHS = (1, 2, 4)
_MAX_ROWS = 2**31
"""The most rows in a chunk, so that sums of gaps stay below 2**63."""

_BODIES, _ANYTHING = Zstd(), Content("", 1)
_SAMPLE_BYTES = 64 * 1024
_SAMPLE_AT_MOST = 0.95
"""Share of the sample's bytes after zstd. If it is larger, the body stays as it is, and the decoder has less to do."""


class PatchCodec(SummaryCodec):
    """Stateless: several threads may use it at once."""

    name: ClassVar[str] = "patch"

    @override
    def encode(self, raw: memoryview, base: memoryview, content: Content) -> bytes | None:
        assert base.nbytes == raw.nbytes
        rows = cut(content, raw.nbytes)
        return None if rows is None else _encode(raw, rows, _differing(rows.table(raw), rows.table(base)))

    @override
    def summarize(self, chunk: memoryview, content: Content) -> bytes | None:
        rows = cut(content, chunk.nbytes)
        return None if rows is None else _summary_head(rows) + hash_rows(rows.table(chunk)).astype("<u4").tobytes()

    @override
    def encode_by_summaries(
        self, raw: memoryview, summary: memoryview, base_summary: memoryview, content: Content
    ) -> bytes | None:
        rows = cut(content, raw.nbytes)
        if rows is None:
            return None
        return _encode(raw, rows, _hashed_otherwise(rows, summary, base_summary))

    @override
    def stand_in(
        self, raw: memoryview, summary: memoryview, base_summary: memoryview, content: Content, out: memoryview
    ) -> None:
        rows = cut(content, raw.nbytes)
        assert rows is not None, "it has summaries"
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(raw, np.uint8))
        rows.table(out)[_hashed_otherwise(rows, summary, base_summary)] ^= 0xFF
        for edge in rows.edges(out):  # no summary covers them
            np.invert(edge, out=edge)

    @override
    def decode(self, frame: memoryview, base: memoryview, out: memoryview) -> None:
        if base.nbytes != out.nbytes:
            _refuse(frame, f"its base has {base.nbytes} bytes, expected {out.nbytes} as the chunk")
        rows, num_stored, width = _read_header(frame, out.nbytes)
        body = _body(frame, num_stored * (rows.nbytes + width) + rows.edges_nbytes)
        stored, edges, gaps = np.split(body, [num_stored * rows.nbytes, len(body) - num_stored * width])
        numbers = _numbers(frame, gaps.view(f"<u{width}"), rows)
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(base, np.uint8))
        rows.table(out)[numbers] = stored.reshape(num_stored, rows.nbytes)
        lead, rest = rows.edges(out)
        lead[:], rest[:] = edges[: rows.lead], edges[rows.lead :]


def _differing(ours: NDArray[np.uint8], theirs: NDArray[np.uint8]) -> NDArray[np.intp]:
    """Returns the numbers of the rows that differ, ascending. Compares bits: a NaN equals itself, and -0 is not 0."""
    nbytes = ours.shape[1]
    word = next(f"u{size}" for size in (8, 4, 2, 1) if nbytes % size == 0)
    return np.flatnonzero((ours.view(word) != theirs.view(word)).any(axis=1))


def _encode(raw: memoryview, rows: Rows, numbers: NDArray[np.intp]) -> bytes | None:
    if len(numbers) * rows.nbytes + rows.edges_nbytes > AT_MOST * raw.nbytes:
        return None
    gaps = np.diff(numbers, prepend=-1) - 1
    width = next(width for width in _WIDTHS if gaps.max(initial=0) < 1 << 8 * width)
    stored = np.take(rows.table(raw), numbers, axis=0)
    body = np.concatenate([stored.ravel(), *rows.edges(raw), gaps.astype(f"<u{width}").view(np.uint8)])
    packed = _compressed(body)
    flags = 0 if packed is None else _ZSTD
    header = _HEADER.pack(flags, width, 0, rows.nbytes, rows.lead, len(numbers), raw.nbytes)
    frame = b"".join([header, body.data if packed is None else packed])
    return frame if len(frame) <= AT_MOST * raw.nbytes else None


def _compressed(body: NDArray[np.uint8]) -> bytes | None:
    """Returns the body compressed by zstd, or None if its first rows say that it does not pay."""
    sample = body[:_SAMPLE_BYTES]
    packed = _BODIES.encode(sample.data, _ANYTHING)
    if packed is None or len(packed) > _SAMPLE_AT_MOST * len(sample):
        return None
    return packed if len(sample) == len(body) else _BODIES.encode(body.data, _ANYTHING)


def _read_header(frame: memoryview, nbytes: int) -> tuple[Rows, int, int]:
    """Returns the rows of the chunk, the number of stored rows, and the width of gaps. Every later size follows from
    these, so they are checked against the chunk's size."""
    if frame.nbytes < _HEADER.size:
        _refuse(frame, f"is shorter than its header of {_HEADER.size} bytes")
    flags, width, zero, row_nbytes, lead, num_stored, chunk_nbytes = _HEADER.unpack_from(frame)
    if flags not in (0, _ZSTD) or width not in _WIDTHS or zero:
        _refuse(frame, f"has flags {flags}, width {width} and {zero}, expected 0 or 1; 1, 2 or 4; 0")
    if chunk_nbytes != nbytes:
        _refuse(frame, f"is of a chunk of {chunk_nbytes} bytes, expected {nbytes}")
    if row_nbytes < MIN_ROW_BYTES or lead >= row_nbytes:
        _refuse(frame, f"has rows of {row_nbytes} bytes, of which {lead} lead; expected {MIN_ROW_BYTES} or more")
    rows = Rows(row_nbytes, lead, nbytes)
    if lead > nbytes or num_stored > rows.num or rows.num >= _MAX_ROWS:
        _refuse(frame, f"stores {num_stored} rows after {lead} bytes; {rows.num} of {row_nbytes} bytes fit")
    return rows, num_stored, width


def _body(frame: memoryview, nbytes: int) -> NDArray[np.uint8]:
    """Returns the body, which must have `nbytes`. Allocates nothing for a body that claims another size."""
    stored = frame[_HEADER.size :]
    if not frame[0] & _ZSTD:
        if stored.nbytes != nbytes:
            _refuse(frame, f"has a body of {stored.nbytes} bytes, expected {nbytes}")
        return np.frombuffer(stored, np.uint8)
    try:
        return np.frombuffer(inflate(stored, nbytes), np.uint8)
    except FormatError as error:
        _refuse(frame, f"in its body, {error}")


def _numbers(frame: memoryview, gaps: NDArray[np.unsignedinteger], rows: Rows) -> NDArray[np.int64]:
    """Returns the numbers of the stored rows. They ascend, so only the last one can be too large."""
    numbers = np.cumsum(gaps, dtype=np.int64) + np.arange(len(gaps))
    if len(numbers) and numbers[-1] >= rows.num:
        _refuse(frame, f"stores row {numbers[-1]}, but the chunk has {rows.num}")
    return numbers


def _summary_head(rows: Rows) -> bytes:
    return _SUMMARY.pack(rows.nbytes, rows.lead, rows.chunk_nbytes)


def _hashed_otherwise(rows: Rows, summary: memoryview, base_summary: memoryview) -> NDArray[np.intp]:
    """Returns the numbers of the rows whose hashes differ from the base's, ascending."""
    return np.flatnonzero((_hashes(summary, rows) != _hashes(base_summary, rows)).any(axis=0))


def _hashes(summary: memoryview, rows: Rows) -> NDArray[np.uint32]:
    head = _summary_head(rows)
    if summary.nbytes != len(head) + HASH_BYTES * rows.num or bytes(summary[: len(head)]) != head:
        raise FormatError(
            f"summary of {summary.nbytes} bytes for the codec patch: is not of a chunk of {rows.chunk_nbytes} bytes "
            f"with rows of {rows.nbytes} from {rows.lead} on; store the chunk whole"
        )
    return np.frombuffer(summary, "<u4", offset=len(head)).reshape(NUM_LANES, rows.num)


def _refuse(frame: memoryview, why: str) -> NoReturn:
    raise FormatError(
        f"patch frame of {frame.nbytes} bytes: {why}; the object was altered, or a newer ckptlib wrote it"
    )
