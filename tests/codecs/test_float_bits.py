"""Where each bit of a float goes, by an oracle that moves them one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptlib.codecs.float_bits import KINDS, Cutter

CUTTER = Cutter(40)
WHERE = {
    # which bits of the float, the highest first, become (exponents, mantissas, low)
    "float32": (range(30, 22, -1), [*range(22, 15, -1), 31], range(15, -1, -1)),
    "bfloat16": (range(14, 6, -1), [*range(6, -1, -1), 15], []),
    "float16": (range(14, 6, -1), [*range(6, -1, -1), 15], []),
    "float64": (range(59, 51, -1), [51, 50, 49, 48, 63, 62, 61, 60], range(47, -1, -1)),
    "float8_e4m3fn": (range(7, -1, -1), [], []),
    "float8_e5m2": (range(7, -1, -1), [], []),
}


def pick(value: int, bits: object) -> int:
    assert isinstance(bits, range | list)
    return sum((value >> bit & 1) << place for place, bit in enumerate(reversed(bits)))


@pytest.mark.parametrize("dtype", WHERE)
@settings(deadline=None)
@given(data=st.data())
def test_cut_and_join(dtype: str, data: st.DataObject) -> None:
    kind = KINDS[dtype]
    items = data.draw(st.lists(st.integers(0, 2 ** (8 * kind.itemsize) - 1), max_size=40))
    raw = np.frombuffer(b"".join(item.to_bytes(kind.itemsize, "little") for item in items), np.uint8)
    exponents, mantissas, low = (
        np.full(len(items) * size, 0xA5, np.uint8) for size in (1, kind.mantissa_bytes, kind.low_bytes)
    )
    CUTTER.cut(kind, raw, exponents, mantissas, low)
    of_exponents, of_mantissas, of_low = WHERE[dtype]
    assert exponents.tolist() == [pick(item, of_exponents) for item in items]
    if of_mantissas:
        assert mantissas.tolist() == [pick(item, of_mantissas) for item in items]
    lows = [pick(item, of_low) for item in items]
    if kind.itemsize == 4:
        assert low.view("<u2").tolist() == lows
    if kind.itemsize == 8:
        cut = 4 * len(items)
        words = zip(low[:cut].view("<u4").tolist(), low[cut:].view("<u2").tolist(), strict=True)
        assert [lowest | upper << 32 for lowest, upper in words] == lows
    out = np.full_like(raw, 0xA5)
    CUTTER.join(kind, exponents, mantissas, low, out)
    assert out.tobytes() == raw.tobytes()


def test_every_float_of_torch_is_known_by_its_name() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "float4_e2m1fn_x2"):
        pytest.skip("before torch 2.8")
    floats = {str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    for dtype, kind in KINDS.items():
        assert dtype in floats
        assert getattr(torch, dtype).itemsize == kind.itemsize


@pytest.mark.parametrize("value", [1.5, 3e-8, 1e-5, 0.02])
def test_the_exponent_is_one_byte(value: float) -> None:
    """What the rotation is for: numbers of one octave share it, whatever their sign and mantissa."""
    octave = np.array([1, 1.01, 1.3, -1.2]) * 2.0 ** np.floor(np.log2(value))
    for dtype in ("float32", "float64"):
        kind, raw = KINDS[dtype], octave.astype(dtype).view(np.uint8)
        exponents, mantissas, low = (np.empty(4 * size, np.uint8) for size in (1, 1, kind.low_bytes))
        CUTTER.cut(kind, raw, exponents, mantissas, low)
        assert len(set(exponents.tolist())) == 1
