"""Eight bits per number: which numbers the codes stand for, and that sums of squares never become zero."""

from __future__ import annotations

import struct
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.codecs.codec import Content
from ckptlib.codecs.lossy8 import Linear8, Logarithmic8, levels
from ckptlib.codecs.lossy_codec import LossyCodec
from ckptlib.errors import FormatError

FLOAT32 = Content("float32", 1)


def float32(value: Fraction | float) -> float:
    """Rounded once to the nearest; the oracle of an IEEE operation on exact operands."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def read(frame: bytes, num_values: int, level: dict[int, float]) -> list[float]:
    """A reader of its own, as FORMAT tells it, of a frame without raw blocks."""
    num_blocks = -(-num_values // 256)
    scales = struct.unpack_from(f"<{num_blocks}f", frame, 16)
    codes = frame[16 + 4 * num_blocks :][:num_values]
    assert not any(frame[16 + 4 * num_blocks + num_values :])
    return [float32(level[code] * scales[i // 256]) for i, code in enumerate(codes)]  # float64 holds the product


LINEAR = {code % 256: float32(code * float32(Fraction(1, 127))) for code in range(-127, 128)}
EIGHTH = 1.090507732665257659207  # 2**(1/8)
LOGARITHMIC = {0: 0.0}
for code in range(1, 256):
    octave, eighth = divmod(code - 255, 8)
    LOGARITHMIC[code] = float32(EIGHTH**eighth * 2.0**octave)


def test_levels_are_powers_of_two_to_the_eighth() -> None:
    assert levels().tolist() == [LOGARITHMIC[code] for code in range(256)]
    for code in range(1, 256):
        exact = Fraction(2) ** (code - 255)  # level**8
        assert abs(Fraction(LOGARITHMIC[code]) ** 8 / exact - 1) < Fraction(8, 2**24)


@pytest.mark.parametrize(("codec", "level"), [(Linear8(), LINEAR), (Logarithmic8(), LOGARITHMIC)])
def test_frames_read_by_their_description(codec: LossyCodec, level: dict[int, float]) -> None:
    values = np.random.default_rng(1).lognormal(-20, 3, 1000).astype(np.float32)
    if codec.name == "lossy8-linear":
        values[::3] *= -1
    frame = codec.encode(memoryview(values).cast("B"), FLOAT32)
    assert frame is not None
    out = np.empty(1000, np.float32)
    codec.decode(memoryview(frame), memoryview(out).cast("B"))
    assert out.tolist() == read(frame, 1000, level)


def test_linear_takes_the_nearest_multiple() -> None:
    values = np.concatenate([[1.0], np.linspace(-1, 1, 8191)]).astype(np.float32)
    values[::256] = 1.0
    frame = Linear8().encode(memoryview(values).cast("B"), FLOAT32)
    assert frame is not None
    codes = np.frombuffer(frame, np.int8, 8192, 16 + 4 * 32)
    assert np.abs(codes - values.astype(np.float64) * 127).max() <= 0.5 + 1e-5
    assert codes[0] == 127


def test_linear_refuses_the_code_that_it_never_gives() -> None:
    values = np.linspace(-1, 1, 1000, dtype=np.float32)
    frame = bytearray(Linear8().encode(memoryview(values).cast("B"), FLOAT32) or b"")
    frame[16 + 4 * 4 + 500] = 0x80
    with pytest.raises(FormatError, match="a code is -128; expected -127 to 127"):
        Linear8().decode(memoryview(frame), memoryview(bytearray(4000)))


def test_logarithmic_every_number_of_an_octave() -> None:
    """All 2**23: off by 4.5 % of itself at most, and by 4.2 % of the scale."""
    codec = Logarithmic8()
    values = np.arange(0x3F000000, 0x3F800000, 3, dtype=np.uint32).view(np.float32).copy()
    values[::256] = 1.0
    frame = codec.encode(memoryview(values).cast("B"), FLOAT32)
    assert frame is not None, "none missed the declared bound"
    assert len(frame) < 0.2541 * values.nbytes
    out = np.empty_like(values)
    codec.decode(memoryview(frame), memoryview(out).cast("B"))
    errors = np.abs(out.astype(np.float64) - values)
    assert (errors / values).max() < 0.045
    assert errors.max() < 0.042


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=256), st.floats(-90, 120))
def test_what_is_positive_stays_positive(parts: list[float], exponent: float) -> None:
    """Else Adam's next step there would be exp_avg / eps."""
    values = np.full(2560, 2.0**exponent, np.float32)
    with np.errstate(under="ignore"):
        values[1 : 1 + len(parts)] *= np.array(parts, np.float32)
    frame = Logarithmic8().encode(memoryview(values).cast("B"), FLOAT32)
    assert frame is not None
    out = np.empty_like(values)
    Logarithmic8().decode(memoryview(frame), memoryview(out).cast("B"))
    assert ((out > 0) == (values > 0)).all()
    within = values >= values[0] * np.float32(2.0**-31.5)
    assert (np.abs(out[within].astype(np.float64) / values[within] - 1) < 0.045).all()
    assert (out[~within] >= values[~within]).all()
    assert (out[~within] <= values[0] * np.float32(2.0**-31.4)).all()


@pytest.mark.parametrize("bad", [-1e-9, -0.0])
def test_logarithmic_stores_a_block_with_a_negative_number_raw(bad: float) -> None:
    values = np.random.default_rng(0).random(2560, np.float32)
    values[700] = bad
    frame = Logarithmic8().encode(memoryview(values).cast("B"), FLOAT32)
    assert frame is not None
    out = np.empty_like(values)
    Logarithmic8().decode(memoryview(frame), memoryview(out).cast("B"))
    assert out[512:768].tobytes() == values[512:768].tobytes()
    assert (out[:512] != values[:512]).any()


def test_logarithmic_keeps_what_a_processor_would_flush_to_zero() -> None:
    """It is positive, and stays so: an optimizer divides by it."""
    values = np.ones(2560, np.float32)
    values[1] = 2.0**-140
    assert torch.set_flush_denormal(True), "this processor has no such mode"
    try:
        frame = Logarithmic8().encode(memoryview(values).cast("B"), FLOAT32)
    finally:
        torch.set_flush_denormal(False)
    assert frame is not None
    assert read(frame, 2560, LOGARITHMIC)[1] > 0
