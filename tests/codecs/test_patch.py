"""The codec `patch`: what comes back, what a frame takes, and that both ways to encode agree."""

from __future__ import annotations

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs.codec import Content
from ckptlib.codecs.patch import PatchCodec
from ckptlib.codecs.registry import find

CODEC = PatchCodec()
TABLE = Content("float32", 64)
MIB = 1 << 20


def encoded(raw: bytes, base: bytes, content: Content) -> bytes | None:
    """By the base, and by summaries: the same frame."""
    frame = CODEC.encode(memoryview(raw), memoryview(base), content)
    summary, before = CODEC.summarize(memoryview(raw), content), CODEC.summarize(memoryview(base), content)
    if summary is None or before is None:
        assert frame is summary is before is None
        return None
    views = memoryview(raw), memoryview(summary), memoryview(before)
    assert CODEC.encode_by_summaries(*views, content) == frame
    return frame


def decoded(frame: bytes, base: bytes) -> bytes:
    out = bytearray(b"\xa5" * len(base))
    CODEC.decode(memoryview(frame), memoryview(base), memoryview(out))
    return bytes(out)


def by_definition(frame: bytes, base: bytes) -> bytes:
    """A decoder that goes row by row."""
    flags, width, _, nbytes, lead, num_stored, _ = struct.unpack_from("<BBHIIIQ", frame)
    body = zstandard.ZstdDecompressor().decompress(frame[24:]) if flags else frame[24:]
    out, num = bytearray(base), (len(base) - lead) // nbytes
    rest = len(base) - lead - num * nbytes
    edges = num_stored * nbytes
    gaps = edges + lead + rest
    out[:lead] = body[edges : edges + lead]
    out[len(base) - rest :] = body[edges + lead : gaps]
    number = -1
    for i in range(num_stored):
        number += 1 + int.from_bytes(body[gaps + i * width :][:width], "little")
        at = lead + number * nbytes
        out[at : at + nbytes] = body[i * nbytes :][:nbytes]
    assert len(body) == gaps + num_stored * width
    return bytes(out)


def random_bytes(num: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(num)


def touched(base: bytes, starts: list[int], nbytes: int, lead: int = 0) -> bytes:
    """`base` with other bytes in some rows."""
    raw = bytearray(base)
    for seed, start in enumerate(starts):
        at = lead + start * nbytes
        raw[at : at + nbytes] = random_bytes(nbytes, seed + 1)
    return bytes(raw)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["uint8", "bfloat16", "float32", "float64", "complex128"]))
    row = data.draw(st.integers(1, 400))
    content = Content(dtype, row, data.draw(st.integers(0, row - 1)))
    nbytes = data.draw(st.integers(0, 60_000))
    base = random_bytes(nbytes) if data.draw(st.booleans()) else bytes(nbytes)
    raw = bytearray(base)
    for at in data.draw(st.lists(st.integers(0, max(0, nbytes - 1)), max_size=40)):
        if nbytes:
            raw[at] ^= data.draw(st.integers(1, 255))
    frame = encoded(bytes(raw), base, content)
    if frame is not None:
        assert len(frame) <= 0.98 * nbytes
        assert decoded(frame, base) == raw == by_definition(frame, base)
    elif nbytes >= 50_000:
        assert raw != base, "an unchanged chunk of many rows is a small frame"


@pytest.mark.parametrize(
    "value",
    [np.uint32(0x7FC00001), np.uint32(0xFFFFFFFF), np.uint32(0x80000000), np.uint32(1), np.uint32(0x7F800000)],
    ids=["NaN with payload", "negative NaN", "-0", "denormal", "inf"],
)
def test_compares_bits(value: np.uint32) -> None:
    """A NaN that stays is no change; -0 for 0, or another payload, is one."""
    base = np.full(MIB // 4, np.uint32(0x7FC00000))
    base[1000:] = 0
    raw = base.copy()
    raw[[5, 5000, 100_000]] = value
    frame = encoded(raw.tobytes(), base.tobytes(), TABLE)
    assert frame is not None
    assert struct.unpack_from("<I", frame, 12) == (3,)
    assert decoded(frame, base.tobytes()) == raw.tobytes()


def test_nothing_changed_takes_a_header() -> None:
    base = random_bytes(MIB)
    frame = encoded(base, base, TABLE)
    assert frame is not None
    assert len(frame) < 64
    assert decoded(frame, base) == base


@pytest.mark.parametrize("row", [16, 32, 64, 75, 256, 1024, 4096])
@pytest.mark.parametrize("lead", [0, 5])
def test_takes_what_was_touched(row: int, lead: int) -> None:
    """Rows that zstd cannot help, 1 % of them; the edges of a chunk are at most two rows."""
    nbytes, size = row * 4, 4 * MIB
    num = (size - lead * 4) // nbytes
    starts = sorted(np.random.default_rng(3).choice(num, max(1, num // 100), replace=False).tolist())
    base = random_bytes(size)
    raw = touched(base, starts, nbytes, lead * 4)
    frame = encoded(raw, base, Content("float32", row, -lead % row))
    assert frame is not None
    assert len(frame) <= (1.02 + 0.02 * (row == 16)) * len(starts) * nbytes + 2 * nbytes + 24
    if row in (64, 256) and not lead:
        assert len(frame) <= 1.02 * len(starts) * nbytes
    assert decoded(frame, base) == raw


@pytest.mark.parametrize("lead", [0, 5])
def test_a_stand_in_has_no_byte_of_what_a_frame_must_hold(lead: int) -> None:
    """Rows that differ by their hashes, and edges, of which there are none; all else is as it is."""
    content, base = Content("float32", 64, -lead % 64), random_bytes(256 * 100 + 20)
    raw = touched(base, [3, 4, 98], 256, 4 * lead)
    summary, before = CODEC.summarize(memoryview(raw), content), CODEC.summarize(memoryview(base), content)
    assert summary is not None
    assert before is not None
    out = bytearray(b"\xa5" * len(raw))
    CODEC.stand_in(memoryview(raw), memoryview(summary), memoryview(before), content, memoryview(out))
    same = np.frombuffer(out, np.uint8) == np.frombuffer(raw, np.uint8)
    num = (len(raw) - 4 * lead) // 256
    expected = np.zeros(len(raw), bool)
    expected[4 * lead : 4 * lead + 256 * num] = True
    for row in (3, 4, 98):
        expected[4 * lead + 256 * row :][:256] = False
    assert np.array_equal(same, expected)


@pytest.mark.parametrize("distance", [256, 257, 65_536, 65_537])
def test_gaps_of_every_width(distance: int) -> None:
    base = bytes(64 * (distance + 2))
    raw = touched(base, [0, distance, distance + 1], 64)
    frame = encoded(raw, base, Content("uint8", 64))
    assert frame is not None
    assert frame[1] == (1 if distance <= 256 else 2 if distance <= 65_536 else 4)
    assert decoded(frame, base) == raw == by_definition(frame, base)


@pytest.mark.parametrize("every", [1, 2])
def test_dense_changes_are_left_to_others(every: int) -> None:
    """All rows, or so many that the gaps make up for the rest."""
    base = random_bytes(MIB)
    num = MIB // 256
    rows = [row for row in range(num) if row % 50 or every == 1]
    raw = touched(base, rows, 256)
    frame = encoded(raw, base, TABLE)
    assert frame is None
    half = encoded(touched(base, rows[: num // 2], 256), base, TABLE)
    assert half is not None
    assert len(half) < 0.51 * MIB


def test_several_dtypes_have_no_rows() -> None:
    assert encoded(random_bytes(4096), random_bytes(4096), Content("", 1)) is None


def test_zstd_where_it_pays() -> None:
    rng = np.random.default_rng(0)
    base = np.zeros((MIB // 256, 64), np.float32)
    raw = base.copy()
    raw[::4] = np.float32(0.02) * rng.standard_normal((len(raw) // 4, 64)).astype(np.float16)  # zeros in the low bits
    frame = encoded(raw.tobytes(), base.tobytes(), TABLE)
    assert frame is not None
    assert frame[0] == 1
    assert len(frame) < 0.9 * MIB / 4
    assert decoded(frame, base.tobytes()) == raw.tobytes() == by_definition(frame, base.tobytes())
    noise = encoded(touched(raw.tobytes(), [1, 7], 256), raw.tobytes(), TABLE)
    assert noise is not None
    assert noise[0] == 0, "noise stays as it is"


def test_memory_is_bounded() -> None:
    """Half of the rows changed: twice the chunk to encode, a part of it to decode. All of them changed: a part, too."""
    base = random_bytes(4 * MIB)
    raw = touched(base, list(range(0, 4 * MIB // 256, 2)), 256)
    other = random_bytes(len(base), 9)
    peaks = []
    summaries = [CODEC.summarize(memoryview(data), TABLE) or b"" for data in (raw, base)]
    out = bytearray(len(base))
    frame = CODEC.encode(memoryview(raw), memoryview(base), TABLE)
    assert frame is not None
    for work in (
        lambda: CODEC.encode(memoryview(raw), memoryview(base), TABLE),
        lambda: CODEC.encode_by_summaries(memoryview(raw), *map(memoryview, summaries), TABLE),
        lambda: CODEC.summarize(memoryview(raw), TABLE),
        lambda: CODEC.decode(memoryview(frame), memoryview(base), memoryview(out)),
        lambda: CODEC.encode(memoryview(other), memoryview(base), TABLE),
    ):
        tracemalloc.start()
        work()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks[:2]) < 2 * len(base)
    assert peaks[2] < len(base) // 2
    assert peaks[3] < len(base) // 4
    assert peaks[4] < len(base) // 2, "no frame is made where none can pay"


def test_is_known_by_its_name() -> None:
    assert isinstance(find("patch"), PatchCodec)
    assert PatchCodec.lossless


def test_many_threads() -> None:
    base = random_bytes(MIB)

    def trip(seed: int) -> bool:
        rows = np.random.default_rng(seed).choice(MIB // 256, 50, replace=False).tolist()
        raw = touched(base, rows, 256)
        frame = encoded(raw, base, TABLE)
        return frame is not None and decoded(frame, base) == raw

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(trip, range(32)))


@pytest.mark.parametrize(("num_equal", "flags"), [(8, 0), (32, 1)])
def test_a_body_is_compressed_where_that_saves_a_twentieth(num_equal: int, flags: int) -> None:
    """Else the decoder would have work for next to nothing. Of each 256 rows of noise some are zeros."""
    base = np.ones((4096, 256), np.uint8)
    raw, stored = base.copy(), np.random.default_rng(0).integers(0, 256, (4, 256, 256))
    stored[:, :num_equal] = 0
    raw[::4] = stored.reshape(1024, 256)
    frame = encoded(raw.tobytes(), base.tobytes(), TABLE)
    assert frame is not None
    assert frame[0] == flags
    assert decoded(frame, base.tobytes()) == raw.tobytes()
