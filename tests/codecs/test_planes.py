"""Codec "planes" gives every float back bit for bit, in as few bytes as it should."""

from __future__ import annotations

import os
import signal
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from chunks import CONTENTS, FLOATS, chunks, gaussian, moments, round_trip
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs import planes
from ckptlib.codecs.codec import Content
from ckptlib.codecs.planes import BLOCK, Planes
from ckptlib.errors import FormatError

CODEC = Planes()


@settings(deadline=None)
@given(chunks(), CONTENTS)
def test_round_trip(raw: bytes, content: Content) -> None:
    frame = round_trip(CODEC, raw, content)
    if content.dtype not in FLOATS:
        assert frame is None


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("more", [-1, 0, 1, 3, BLOCK // 2])
def test_round_trip_about_the_size_of_a_block(dtype: str, more: int) -> None:
    raw = gaussian(dtype, BLOCK + more)
    frame = round_trip(CODEC, raw + b"\x01\x02\x03"[: FLOATS[dtype] - 1], Content(dtype, 192, 7))
    assert frame is not None
    assert len(frame) < {1: 0.95, 2: 0.9, 4: 0.86, 8: 0.87}[FLOATS[dtype]] * len(raw)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_every_pattern_of_the_upper_bits(dtype: str) -> None:
    """NaN payloads, infinities, denormals, zeros of both signs; the low bits differ, too."""
    upper = np.arange(1 << 16, dtype="<u8")
    shift = 8 * FLOATS[dtype] - 16
    raw = (upper << shift | (upper * 40503) % (1 << shift)).astype(f"<u{FLOATS[dtype]}").tobytes()
    assert round_trip(CODEC, raw * 8 + bytes(len(raw) * 8), Content(dtype, 256)) is not None


@pytest.mark.parametrize(
    "value",
    [0.0, -0.0, float("nan"), float("inf"), 1e-310, 5e-324, struct.unpack("<d", b"\1\2\3\4\5\6\xf7\xff")[0]],
)
def test_one_value_throughout_is_nearly_nothing(value: float) -> None:
    frame = round_trip(CODEC, struct.pack("<d", value) * 100_000, Content("float64", 1))
    assert frame is not None
    assert len(frame) < 2000


@pytest.mark.parametrize("nbytes", [0, 1, 2, 3, 4, 8, 100])
def test_tiny_chunks_stay_raw(nbytes: int) -> None:
    assert CODEC.encode(memoryview(bytes(nbytes)), Content("float32", 1)) is None


def test_noise_stays_raw() -> None:
    raw = np.random.default_rng(0).bytes(1 << 20)
    for dtype in FLOATS:
        assert CODEC.encode(memoryview(raw), Content(dtype, 512)) is None


def test_a_large_chunk_of_rows_that_straddle_blocks() -> None:
    raw = moments(3 * BLOCK // 1000, 1000)
    frame = round_trip(CODEC, raw[4 * 123 :], Content("float32", 1000, 123))
    assert frame is not None
    wrong = round_trip(CODEC, raw[4 * 123 :], Content("float32", 1000, 623))
    assert wrong is not None
    assert len(frame) + 0.008 * len(raw) < len(wrong), "where rows begin is worth knowing"


def test_exponents_take_no_more_than_their_entropy() -> None:
    raw = gaussian("float32", 4 * BLOCK)
    frame = round_trip(CODEC, raw, Content("float32", 1024))
    assert frame is not None
    exponents = np.frombuffer(raw, "<u4") >> 23 & 255
    shares = np.bincount(exponents) / len(exponents)
    bits = -sum(share * np.log2(share) for share in shares if share)
    assert len(frame) <= 1.003 * (bits + 24) / 8 * len(exponents)


def test_low_bits_that_are_no_noise_are_coded() -> None:
    """bfloat16 kept in float32: half of every element is zeros."""
    raw = (np.frombuffer(gaussian("float32", 100_000), "<u4") & 0xFFFF0000).astype("<u4").tobytes()
    frame = round_trip(CODEC, raw, Content("float32", 1))
    assert frame is not None
    assert len(frame) < 0.35 * len(raw)


def test_the_sign_of_positive_numbers_takes_no_room() -> None:
    raw = np.abs(np.frombuffer(gaussian("float32", 2 * BLOCK), "<f4"))
    both, positive = (
        round_trip(CODEC, data, Content("float32", 1)) for data in (gaussian("float32", 2 * BLOCK), raw.tobytes())
    )
    assert both is not None
    assert positive is not None
    assert len(positive) <= len(both) - len(raw) // 8 + 100
    late = raw.copy()
    late[-1] = -1.0  # the sample saw nothing of it
    round_trip(CODEC, late.tobytes(), Content("float32", 1))


def test_a_sample_may_be_wrong() -> None:
    """What it saw none of comes later: planes that it calls noise turn to zeros, and the other way round."""
    random = np.random.default_rng(0)
    for content in (Content("float32", 1), Content("float32", 300)):
        zeros = np.zeros((2000, 300), "<u4")
        zeros[:, 130:] = random.integers(0, 2**32, (2000, 170), dtype=np.uint32)
        round_trip(CODEC, zeros.tobytes(), content)
        round_trip(CODEC, np.ascontiguousarray(zeros[:, ::-1]).tobytes(), content)


@settings(deadline=None)
@given(st.integers(0, 7), st.integers(0, 7))
def test_memory_need_not_be_aligned(before: int, out_before: int) -> None:
    raw = gaussian("float64", 1000) + b"\x01"
    held, out = bytes(before) + raw, bytearray(out_before + len(raw) + 5)
    frame = CODEC.encode(memoryview(held)[before:], Content("float64", 1))
    assert frame is not None
    CODEC.decode(memoryview(frame), memoryview(out)[out_before : out_before + len(raw)])
    assert out == bytes(out_before) + raw + bytes(5), "and nothing beside it was touched"


def test_a_process_that_is_forked_while_a_thread_decodes_can_decode() -> None:
    """A data loader's, in the middle of a load: the thread that had the turn is not there to give it back."""
    raw = gaussian("float32", 1000)
    frame = CODEC.encode(memoryview(raw), Content("float32", 1))
    assert frame is not None
    with planes._turn:
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            out = bytearray(len(raw))
            CODEC.decode(memoryview(frame), memoryview(out))
            os._exit(0 if out == raw else 1)
        assert os.waitpid(pid, 0)[1] == 0


def test_a_frame_that_is_refused_gives_the_turn_back() -> None:
    for _ in range(2):
        with pytest.raises(FormatError):
            CODEC.decode(memoryview(b"\xff" * 100), memoryview(bytearray(1000)))


def test_threads_do_not_meet() -> None:
    raws = [moments(700, 300, seed) for seed in range(8)]
    content = Content("float32", 300)
    alone = [CODEC.encode(memoryview(raw), content) for raw in raws]
    with ThreadPoolExecutor(4) as pool:
        frames = list(pool.map(lambda raw: round_trip(CODEC, raw, content), raws * 3))
    assert frames == alone * 3
