"""Frames of lossy codecs: exact lengths, and contradictions in them."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from ckptlib.codecs.codec import Content
from ckptlib.codecs.lossy8 import Linear8
from ckptlib.errors import FormatError

NUM_VALUES = 2000
SCALES, CODES, BITS, RAW = 16, 16 + 4 * 8, 16 + 4 * 8 + NUM_VALUES, 16 + 4 * 8 + NUM_VALUES + 1


def made(raw_blocks: tuple[int, ...] = ()) -> bytearray:
    values = np.linspace(0.5, 1, NUM_VALUES, dtype=np.float32)
    for block in raw_blocks:
        values[256 * block] = np.nan
    return bytearray(Linear8().encode(memoryview(values).cast("B"), Content("float32", 1)) or b"")


def decode(frame: bytes) -> np.ndarray:
    out = np.empty(NUM_VALUES, np.float32)
    Linear8().decode(memoryview(frame), memoryview(out).cast("B"))
    return out


@pytest.mark.parametrize(
    ("raw_blocks", "num_raw", "bits"),
    [((), 0, 0), ((0,), 256, 1), ((2, 5), 512, 0b100100), ((7,), 208, 0x80), ((1, 7), 464, 0x82)],
)
def test_layout(raw_blocks: tuple[int, ...], num_raw: int, bits: int) -> None:
    frame = made(raw_blocks)
    assert len(frame) == RAW + 4 * num_raw
    assert frame[BITS] == bits
    scales = struct.unpack_from("<8f", frame, SCALES)
    assert [scale == 0 for scale in scales] == [block in raw_blocks for block in range(8)]
    found = decode(frame)
    assert np.flatnonzero(np.isnan(found)).tolist() == [256 * block for block in raw_blocks]
    for block in raw_blocks:
        assert not any(frame[CODES + 256 * block : CODES + min(256 * block + 256, NUM_VALUES)])


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, -0.0, 1e-40, 2.0**-95])
def test_refuses_scales_that_no_encoder_gives(scale: float) -> None:
    frame = made()
    struct.pack_into("<f", frame, SCALES + 4 * 3, scale)
    with pytest.raises(FormatError, match=r"block 3 the scale .*; expected 0, or"):
        decode(frame)


def test_refuses_a_scale_for_a_raw_block() -> None:
    frame = made((3,))
    struct.pack_into("<f", frame, SCALES + 4 * 3, 1.0)
    with pytest.raises(FormatError, match="block 3 the scale 1"):
        decode(frame)


@pytest.mark.parametrize(("bits", "raw_blocks"), [(0b1, ()), (0, (0,)), (0x81, (0,)), (0xFF, ())])
def test_refuses_marks_that_do_not_go_with_the_length(bits: int, raw_blocks: tuple[int, ...]) -> None:
    frame = made(raw_blocks)
    frame[BITS] = bits
    with pytest.raises(FormatError, match="raw blocks; expected"):
        decode(frame)


def test_refuses_marks_beyond_the_last_block() -> None:
    values = np.linspace(0.5, 1, 700, dtype=np.float32)
    frame = bytearray(Linear8().encode(memoryview(values).cast("B"), Content("float32", 1)) or b"")
    frame[-1] |= 0b1000
    with pytest.raises(FormatError, match="beyond its last one, number 2"):
        Linear8().decode(memoryview(frame), memoryview(bytearray(2800)))
