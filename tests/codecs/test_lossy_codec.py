"""What every lossy codec promises: its bound, the same bits whenever it decodes, and its doubts stored raw."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ckptlib.codecs.bfloat16 import Bfloat16
from ckptlib.codecs.codec import Content
from ckptlib.codecs.lossy8 import Linear8, Logarithmic8
from ckptlib.codecs.lossy_codec import LossyCodec
from ckptlib.codecs.registry import find
from ckptlib.errors import FormatError

CODECS = [Linear8(), Logarithmic8(), Bfloat16()]
FLOAT32 = Content("float32", 1)
Floats = NDArray[np.float32]

each = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def raw(values: Floats) -> memoryview:
    return memoryview(np.ascontiguousarray(values)).cast("B")


def encode(codec: LossyCodec, values: Floats) -> bytes:
    frame = codec.encode(raw(values), FLOAT32)
    assert frame is not None
    return frame


def decode(codec: LossyCodec, frame: bytes, num_values: int) -> Floats:
    out = np.full(num_values, 7, np.float32)
    codec.decode(memoryview(frame), raw(out))
    return out


def noise(num_values: int, seed: int = 0) -> Floats:
    """Positive, of many sizes, so that every codec takes it."""
    generator = np.random.default_rng(seed)
    return (generator.lognormal(0, 2, num_values) * 1e-6).astype(np.float32)


def blocks(values: Floats) -> list[Floats]:
    return [values[at : at + 256] for at in range(0, len(values), 256)]


@each
@pytest.mark.parametrize("num_values", [1000, 256, 257, 255, 65536, 65537, 256 * 256 * 2 + 3])
def test_the_bound_holds_and_is_the_largest_error(codec: LossyCodec, num_values: int) -> None:
    values = noise(num_values) * (1 if codec.name.endswith("log") else np.tile([1, -1], num_values)[:num_values])
    values = values.astype(np.float32)
    frame = encode(codec, values)
    errors = np.abs(decode(codec, frame, num_values).astype(np.float64) - values)
    relative = max(
        float(error.max() / np.abs(block).max()) for error, block in zip(blocks(errors), blocks(values), strict=True)
    )
    bound = codec.bound(memoryview(frame))
    assert errors.max() <= bound.absolute <= errors.max() * (1 + 1e-6)
    assert relative <= bound.relative <= relative * (1 + 1e-6)
    assert bound.relative <= codec.declared
    assert not codec.lossless
    assert find(codec.name).name == codec.name


@each
def test_size(codec: LossyCodec) -> None:
    """Of a chunk of 4 MiB: a byte, or two, and for 8 bits a scale per 256."""
    share = len(encode(codec, noise(1 << 20))) / (1 << 22)
    assert share <= (0.5002 if codec.name == "lossy-bfloat16" else 0.2541)


FLOATS = st.floats(width=32).map(lambda value: int.from_bytes(struct.pack("<f", value), "little"))
PLACES = st.lists(st.tuples(st.integers(0, 599), st.integers(0, 2**32 - 1) | FLOATS))
"""Where, and the bits of what."""


@each
@given(PLACES, st.integers(1, 600), st.integers(0, 2**31), st.sampled_from([1e-40, 1e-30, 1.0, 1e30, 3e38]))
def test_whatever_bits_there_are(
    codec: LossyCodec, special: list[tuple[int, int]], num_values: int, seed: int, size: float
) -> None:
    """NaN with payload, infinity, denormals, -0, the largest float: within the bound, or bit for bit."""
    values = np.zeros(8192 + num_values, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        values[8192:] = noise(num_values, seed) * np.float32(size)
    bits = values.view(np.uint32)
    for at, pattern in special:
        bits[8192 + at % num_values] = pattern
    frame = encode(codec, values)
    bound, found = codec.bound(memoryview(frame)), decode(codec, frame, len(values))
    assert bound.relative <= codec.declared
    for given_block, found_block in zip(blocks(values), blocks(found), strict=True):
        if given_block.tobytes() == found_block.tobytes():
            continue
        assert np.isfinite(given_block).all()
        assert np.isfinite(found_block).all()
        errors = np.abs(given_block.astype(np.float64) - found_block)
        assert errors.max() <= bound.absolute
        assert errors.max() <= bound.relative * float(np.abs(given_block).max())
    again = encode(codec, found)
    assert decode(codec, again, len(values)).tobytes() == found.tobytes(), "decoding twice changes nothing more"
    assert again[16:] == frame[16:], "the same codes"
    assert codec.encode(raw(values), FLOAT32) == frame, "the same frame"


@each
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 3.4028235e38, 1e-40, 1e-29])
def test_a_block_that_cannot_be_coded_is_raw_and_the_others_are_not(codec: LossyCodec, bad: float) -> None:
    values = noise(256 * 12 + 100)
    second, last = values[256:512], values[256 * 12 :]
    for block in (second, last):
        block[:] = 1e-41 if abs(bad) < 1 else block
        block[5] = bad
    second.view(np.uint32)[6:8] = 0x7FC0BEEF, 0xFF800001  # NaN with payloads, quiet and signalling
    found = decode(codec, encode(codec, values), len(values))
    assert found[256:512].tobytes() == second.tobytes()
    if bad != 3.4028235e38 or codec.name == "lossy-bfloat16":
        assert found[256 * 12 :].tobytes() == last.tobytes()
    else:
        assert found[256 * 12 + 5] == last[5], "the largest of a block keeps its bits"
    assert (found[:256] != values[:256]).any()


@each
def test_zeros_stay_zeros(codec: LossyCodec) -> None:
    frame = encode(codec, np.zeros(5000, np.float32))
    assert codec.bound(memoryview(frame)) == (0, 0)
    assert decode(codec, frame, 5000).tobytes() == bytes(20000)


@each
def test_what_it_would_not_make_smaller_is_not_coded(codec: LossyCodec) -> None:
    assert codec.encode(raw(np.full(5000, np.nan, np.float32)), FLOAT32) is None
    assert codec.encode(raw(np.full(5000, 1e-40, np.float32)), FLOAT32) is None
    assert codec.encode(raw(noise(5)), FLOAT32) is None, "its header alone is as long"
    assert codec.encode(memoryview(b""), FLOAT32) is None
    assert codec.encode(memoryview(bytes(4001)), FLOAT32) is None, "not a number of float32s"
    for dtype in ("bfloat16", "float64", "int32", "float16", ""):
        assert codec.encode(memoryview(bytes(4000)), Content(dtype, 1)) is None


@each
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_memory_at_any_address(codec: LossyCodec, offset: int) -> None:
    values = noise(3000)
    memory = bytearray(offset) + raw(values)
    frame = codec.encode(memoryview(memory)[offset:], FLOAT32)
    assert frame == encode(codec, values)
    out = bytearray(offset + 12000 + 5)
    codec.decode(memoryview(bytes(offset) + frame)[offset:], memoryview(out)[offset : offset + 12000])
    assert out[offset : offset + 12000] == decode(codec, frame, 3000).tobytes()
    assert not any(out[:offset])
    assert not any(out[offset + 12000 :])


@each
def test_flush_to_zero_changes_no_bit_of_what_is_decoded(codec: LossyCodec) -> None:
    values = np.concatenate([noise(256) * np.float32(2.0**-exponent) for exponent in range(120)])
    frame = encode(codec, values)
    expected = decode(codec, frame, len(values))
    assert torch.set_flush_denormal(True), "this processor has no such mode"
    try:
        found = decode(codec, frame, len(values))
    finally:
        torch.set_flush_denormal(False)
    assert found.tobytes() == expected.tobytes()


@each
def test_memory(codec: LossyCodec) -> None:
    """A frame, and some slabs of a megabyte in all."""
    values = noise(4 << 20)
    frame = encode(codec, values)
    out = raw(np.zeros(len(values), np.float32))
    for function, most in (
        (lambda: codec.encode(raw(values), FLOAT32), 3 * len(frame) + (3 << 20)),
        (lambda: codec.decode(memoryview(frame), out), 3 << 20),
    ):
        tracemalloc.start()
        function()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= most


@each
@given(st.integers(0, 2000), st.integers(0, 255), st.integers(0, 3000))
def test_altered_frames_are_refused_or_decoded_in_full(codec: LossyCodec, at: int, byte: int, length: int) -> None:
    values = noise(1000)
    values[300] = np.nan
    frame = bytearray(encode(codec, values))
    frame[at % len(frame)] = byte
    for altered in (bytes(frame), bytes(frame[:length]), bytes(frame) + bytes(length)):
        try:
            found = decode(codec, altered, 1000)
        except FormatError:
            continue
        assert len(altered) == len(frame)
        coded = np.delete(found, np.s_[256:512]) if np.isnan(found[300]) else found[:0]
        assert np.isfinite(coded).all()


@each
@pytest.mark.parametrize(("absolute", "relative"), [(np.nan, 0), (-1, 0), (np.inf, 0), (0, np.nan), (0, -1), (0, 0.1)])
def test_refuses_a_frame_that_claims_larger_errors(codec: LossyCodec, absolute: float, relative: float) -> None:
    frame = struct.pack("<dd", absolute, relative) + encode(codec, noise(1000))[16:]
    with pytest.raises(FormatError, match="claims errors of"):
        codec.bound(memoryview(frame))
    with pytest.raises(FormatError, match="claims errors of"):
        decode(codec, frame, 1000)


@each
@pytest.mark.parametrize("nbytes", [0, 3, 3999, 4001])
def test_refuses_a_chunk_that_holds_no_float32(codec: LossyCodec, nbytes: int) -> None:
    with pytest.raises(FormatError, match=f"a chunk of {nbytes} bytes"):
        codec.decode(memoryview(encode(codec, noise(1000))), memoryview(bytearray(nbytes)))


@each
@pytest.mark.parametrize("num_values", [1, 744, 999, 1001, 1024, 10**6])
def test_refuses_a_frame_of_another_number_of_values(codec: LossyCodec, num_values: int) -> None:
    with pytest.raises(FormatError, match="a lossy frame"):
        decode(codec, encode(codec, noise(1000)), num_values)


@each
@pytest.mark.parametrize("nbytes", [0, 1, 15, 16])
def test_refuses_a_torn_frame(codec: LossyCodec, nbytes: int) -> None:
    with pytest.raises(FormatError, match=f"{nbytes} bytes"):
        decode(codec, encode(codec, noise(1000))[:nbytes], 1000)


class Careless(Linear8):
    """Declares less than it can hold."""

    declared = 0.002


def test_a_block_beyond_the_declared_bound_is_raw() -> None:
    """Whatever is wrong with a codec or a processor, the bound holds."""
    values = noise(25600)
    values[: 256 * 90] = np.where(np.arange(256 * 90) % 2, np.float32(1e-3), np.float32(0))  # coded exactly
    codec = Careless()
    frame = encode(codec, values)
    assert codec.bound(memoryview(frame)) == (0, 0)
    assert len(frame) == 16 + 4 * 100 + 25600 + 13 + 1024 * 10
    assert not any(frame[16 + 4 * 90 : 16 + 4 * 100]), "raw blocks have no scale"
    assert not any(frame[16 + 4 * 100 + 256 * 90 : 16 + 4 * 100 + 25600]), "and no codes"
    assert decode(codec, frame, 25600).tobytes() == values.tobytes()
