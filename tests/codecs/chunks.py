"""Chunks that codecs must give back bit for bit."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from ckptlib.codecs.codec import BaseCodec, Codec, Content

FLOATS = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}
"""Bytes of an element."""


def gaussian(dtype: str, count: int, seed: int = 0) -> bytes:
    """As weights are; the dtypes without a numpy of their own are float32 cut short."""
    values = np.random.default_rng(seed).normal(0, 0.02, count)
    if dtype in ("float16", "float64", "float32"):
        return values.astype(dtype).tobytes()
    upper = values.astype("<f4").view("<u4") >> (16 if dtype == "bfloat16" else 20)
    return upper.astype("<u2" if dtype == "bfloat16" else "u1").tobytes()


def moments(rows: int, row: int, seed: int = 0) -> bytes:
    """float32 that each row and each column has a scale of."""
    random = np.random.default_rng(seed)
    scales = np.exp2(random.normal(0, 3, (rows, 1)) + random.normal(0, 2, row))
    return (random.normal(0, 1e-3, (rows, row)) ** 2 * scales).astype("<f4").tobytes()


CONTENTS = st.builds(
    Content,
    st.sampled_from([*FLOATS, "int64", "bool", "complex64", ""]),
    st.sampled_from([1, 2, 63, 64, 192, 4096, 16384, 16385, 50257, 10**9 + 7]),
    st.integers(0, 20_000),
)


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    """Of every size, from noise to nothing but zeros; some as floats are."""
    nbytes = draw(st.one_of(st.integers(0, 600), st.integers(600, 40_000)))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    kind = draw(st.sampled_from(["noise", "zeros", "few", "float32", "bfloat16", "float64", "moments"]))
    if kind in FLOATS:
        raw = gaussian(kind, nbytes // FLOATS[kind] + 1, seed)
    elif kind == "moments":
        raw = moments(nbytes // 256 + 1, 64, seed)
    else:
        symbols = {"noise": 256, "zeros": 1, "few": draw(st.integers(2, 20))}[kind]
        raw = random.integers(0, symbols, nbytes, dtype=np.uint16).astype(np.uint8).tobytes()
    return raw[:nbytes]


def round_trip(codec: Codec | BaseCodec, raw: bytes, content: Content) -> bytes | None:
    """The frame, once it was seen to give the same bytes back, in memory that held others."""
    assert isinstance(codec, Codec)
    frame = codec.encode(memoryview(raw), content)
    if frame is not None:
        assert isinstance(frame, bytes)
        assert len(frame) <= 0.98 * len(raw)
        out = bytearray(b"\xa5" * len(raw))
        codec.decode(memoryview(frame), memoryview(out))
        assert out == raw
    return frame
