"""Frames of `patch` that no encoder wrote: a FormatError, before memory is taken or a byte of the chunk is written."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckptlib.codecs.codec import Content
from ckptlib.codecs.patch import PatchCodec
from ckptlib.errors import FormatError

CODEC = PatchCodec()
NBYTES = 64 * 1000 + 32
BASE = bytes(range(256)) * 251
BASE = BASE[:NBYTES]
FILL = b"\xa5" * NBYTES


def frame_of(
    body: bytes = b"",
    flags: int = 0,
    width: int = 1,
    zero: int = 0,
    row: int = 64,
    lead: int = 0,
    num: int = 0,
    nbytes: int = NBYTES,
) -> bytes:
    return struct.pack("<BBHIIIQ", flags, width, zero, row, lead, num, nbytes) + body


def good(packed: bool) -> bytes:
    """Three rows of 64 bytes, edges of 10 and 22 bytes."""
    body = bytes(3 * 64 + 32) + b"\0\5\7"
    if packed:
        return frame_of(zstandard.compress(body), flags=1, lead=10, num=3)
    return frame_of(body, lead=10, num=3)


def tried(frame: bytes, base: bytes = BASE) -> bytes:
    """The chunk. Asserts that a refused frame has written nothing, and that little memory was taken."""
    out = bytearray(FILL)
    tracemalloc.start()
    try:
        CODEC.decode(memoryview(frame), memoryview(base), memoryview(out))
    except FormatError:
        assert out == FILL
        raise
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * NBYTES + 4 * len(frame), "memory is taken for what fits the chunk only"
    return bytes(out)


def refused(frame: bytes, why: str, base: bytes = BASE) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        tried(frame, base)
    assert "patch frame" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("packed", [False, True])
def test_the_good_frame_is_good(packed: bool) -> None:
    expected = bytearray(BASE)
    expected[:10] = bytes(10)
    expected[10 + 1000 * 64 :] = bytes(22)
    for row in (0, 6, 14):
        expected[10 + row * 64 : 10 + row * 64 + 64] = bytes(64)
    assert tried(good(packed)) == expected


def test_base_is_missing_or_of_another_length() -> None:
    for base in (b"", BASE[:-1], BASE + b"\0"):
        refused(good(False), f"its base has {len(base)} bytes, expected {NBYTES}", base)


@pytest.mark.parametrize("packed", [False, True])
def test_truncated_anywhere_and_extended(packed: bool) -> None:
    frame = good(packed)
    for length in range(len(frame)):
        refused(frame[:length], ".")
    for more in (b"\0", frame, bytes(1000)):
        refused(frame + more, ".")


HEADERS: dict[str, tuple[dict[str, int], str]] = {
    "unknown flags": ({"flags": 2}, "flags 2"),
    "no width": ({"width": 0}, "width 0"),
    "odd width": ({"width": 3}, "width 3"),
    "width 8": ({"width": 8}, "width 8"),
    "what must be zero": ({"zero": 1}, "and 1"),
    "chunk of 2**60 bytes": ({"nbytes": 2**60}, f"chunk of {2**60} bytes, expected {NBYTES}"),
    "a smaller chunk": ({"nbytes": NBYTES - 1}, "expected"),
    "rows of no bytes": ({"row": 0}, "rows of 0 bytes"),
    "rows of one byte": ({"row": 1, "num": NBYTES}, "rows of 1 bytes"),
    "rows longer than the chunk": ({"row": 2**32 - 1, "num": 1}, "stores 1 rows .* 0 of 4294967295 bytes fit"),
    "all of the chunk leads": ({"row": 2**32 - 1, "lead": 2**32 - 2}, "after 4294967294 bytes"),
    "more leads than a row": ({"lead": 64}, "of which 64 lead"),
    "one row too many": ({"num": 1001}, "stores 1001 rows .* 1000 of 64 bytes fit"),
    "2**32 - 1 rows": ({"num": 2**32 - 1, "width": 4}, "stores 4294967295 rows"),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("flags", [0, 1])
def test_headers(name: str, flags: int) -> None:
    changes, why = HEADERS[name]
    refused(frame_of(bytes(5000), **{"flags": flags, **changes}), why)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("width", "gaps", "row"),
    [
        (2, [1000], 1000),
        (2, [999, 0], 1000),
        (1, [255, 255, 255, 255], 1023),
        (4, [2**32 - 1], 2**32 - 1),
        (4, [2**32 - 1] * 1000, 1000 * 2**32 - 1),
        (4, [0] * 999 + [2**31], 2**31 + 999),
    ],
)
def test_gaps_lead_out_of_the_chunk(packed: bool, width: int, gaps: list[int], row: int) -> None:
    """They add up in 64 bits: 2**31 gaps of 32 bits cannot wrap around to a row that is there."""
    body = bytes(64 * len(gaps) + 32) + b"".join(gap.to_bytes(width, "little") for gap in gaps)
    frame = frame_of(zstandard.compress(body) if packed else body, flags=int(packed), width=width, num=len(gaps))
    refused(frame, f"stores row {row}, but the chunk has 1000")


def test_the_last_row_may_be_stored() -> None:
    frame = frame_of(bytes(64 + 32) + (999).to_bytes(2, "little"), width=2, num=1)
    assert tried(frame) == BASE[: 999 * 64] + bytes(64 + 32)


BODY = bytes(3 * 64 + 32) + b"\0\5\7"
UNSIZED = zstandard.ZstdCompressor(write_content_size=False).compress(BODY)
HUGE = b"\x28\xb5\x2f\xfd\xe0" + (2**60).to_bytes(8, "little") + b"\x01\x00\x00"

BODIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "zstd frame of 0 bytes"),
    "no zstd": (b"no zstd at all, no magic number", "zstd frame of 31 bytes"),
    "a size that is not told": (UNSIZED, "how much"),
    "2**60 bytes": (HUGE, f"to hold 227 bytes, and holds {2**60} bytes"),
    "one byte less": (zstandard.compress(BODY[:-1]), "holds 226 bytes"),
    "one byte more": (zstandard.compress(BODY + b"\0"), "holds 228 bytes"),
    "two frames": (zstandard.compress(BODY) * 2, "unused data"),
    "a frame that is skipped": (b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + zstandard.compress(BODY), "."),
    "a frame that is skipped, of the right size": (b"\x50\x2a\x4d\x18\xe3\0\0\0" + bytes(227), "."),
    "1 GB of zeros": (zstandard.compress(bytes(1 << 20)) * 1024, "holds 1048576 bytes"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_by_zstd(name: str) -> None:
    body, why = BODIES[name]
    refused(frame_of(body, flags=1, lead=10, num=3), why)


def test_a_body_that_tells_another_size_than_it_has() -> None:
    """zstd's header is changed to the size that is expected."""
    short = bytearray(zstandard.compress(BODY[:-1]))
    assert short[5] == 226, "the size is told in one byte"
    short[5] = 227
    refused(frame_of(bytes(short), flags=1, lead=10, num=3), "corruption")


@settings(deadline=None, max_examples=500)
@given(st.booleans(), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), min_size=1, max_size=4))
@example(False, [(0, 1)])
def test_altered_frames(packed: bool, changes: list[tuple[int, int]]) -> None:
    """Refused, or of the chunk's size: never another error."""
    frame = bytearray(good(packed))
    for at, value in changes:
        frame[at % len(frame)] = value
    with suppress(FormatError):
        assert len(tried(bytes(frame))) == NBYTES


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=400))
def test_random_frames(frame: bytes) -> None:
    with pytest.raises(FormatError):
        tried(frame)


SUMMARIES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda summary: b"",
    "torn": lambda summary: summary[:-1],
    "too long": lambda summary: summary + bytes(12),
    "other rows": lambda summary: struct.pack("<I", 128) + summary[4:],
    "other lead": lambda summary: summary[:4] + struct.pack("<I", 4) + summary[8:],
    "other chunk": lambda summary: summary[:8] + struct.pack("<Q", NBYTES + 1) + summary[16:],
}


@pytest.mark.parametrize("name", SUMMARIES)
@pytest.mark.parametrize("which", [0, 1])
def test_summaries_of_something_else(name: str, which: int) -> None:
    content = Content("float32", 16)
    summary = CODEC.summarize(memoryview(BASE), content)
    assert summary is not None
    summaries = [summary, summary]
    summaries[which] = SUMMARIES[name](summary)
    with pytest.raises(FormatError, match=r"summary of .* is not of a chunk of 64032 bytes with rows of 64 from 0 on"):
        CODEC.encode_by_summaries(memoryview(BASE), *map(memoryview, summaries), content)


def test_damaged_hashes_only_store_more() -> None:
    """A hash that flipped calls a row changed that is not: the frame is larger, and right."""
    content = Content("float32", 16)
    raw = np.frombuffer(BASE, np.uint8).copy()
    raw[64 * 7] ^= 1
    summary, before = (
        CODEC.summarize(memoryview(raw), content),
        bytearray(CODEC.summarize(memoryview(BASE), content) or b""),
    )
    assert summary is not None
    before[16 + 4 * 300] ^= 1
    frame = CODEC.encode_by_summaries(memoryview(raw), memoryview(summary), memoryview(before), content)
    assert frame is not None
    assert struct.unpack_from("<I", frame, 12) == (2,)
    assert tried(frame) == raw.tobytes()
