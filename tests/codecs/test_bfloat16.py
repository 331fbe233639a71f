"""bfloat16 as torch rounds it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from ckptlib.codecs.bfloat16 import Bfloat16
from ckptlib.codecs.codec import Content
from ckptlib.errors import FormatError


def through(values: np.ndarray) -> np.ndarray:
    frame = Bfloat16().encode(memoryview(values).cast("B"), Content("float32", 1))
    assert frame is not None
    out = np.empty_like(values)
    Bfloat16().decode(memoryview(frame), memoryview(out).cast("B"))
    return out


def test_rounds_as_torch_does() -> None:
    """Every pattern of the 17 highest bits, beside ties and what lies just above and below them."""
    high = np.arange(0x00800000, 0x7F7F8000, 1 << 15, dtype=np.uint32)
    bits = (high[:, np.newaxis] + np.array([0, 1, 0x7FFF], np.uint32)).reshape(-1)
    bits = np.concatenate([bits, bits | 0x80000000])
    values = bits[bits & 0x7FFFFFFF >= 0x10800000].view(np.float32)  # 2**-94 and more
    values = values[np.argsort(np.abs(values), kind="stable")]
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert through(values).tobytes() == expected.tobytes()


def test_small_numbers_beside_large_ones() -> None:
    values = np.zeros(2560, np.float32)
    values[1::256] = 1.0
    values[:256] = [1.0, *struct.unpack("<255f", np.random.default_rng(0).integers(0, 2**23, 255, np.uint32).tobytes())]
    values[256] = -0.0
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert through(values).tobytes() == expected.tobytes(), "denormals and -0"


def test_what_would_become_infinite_stays() -> None:
    below, above = np.array([0x7F7F7FFF, 0x7F7F8000], np.uint32).view(np.float32)
    values = np.ones(2560, np.float32)
    values[0], values[256], values[257] = below, above, 1.2345678
    found = through(values)
    assert found[0] == np.array(0x7F7F0000, np.uint32).view(np.float32)
    assert found[256:512].tobytes() == values[256:512].tobytes()
    assert found[257] == np.float32(1.2345678), "the block is raw"


@pytest.mark.parametrize("code", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
def test_refuses_codes_of_infinity_and_nan(code: int) -> None:
    values = np.ones(1000, np.float32)
    frame = bytearray(Bfloat16().encode(memoryview(values).cast("B"), Content("float32", 1)) or b"")
    struct.pack_into("<H", frame, 16 + 2 * 500, code)
    with pytest.raises(FormatError, match="infinity or NaN"):
        Bfloat16().decode(memoryview(frame), memoryview(bytearray(4000)))
