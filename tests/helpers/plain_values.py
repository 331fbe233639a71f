"""Values that go through a document, and whether they come back as they were."""

from __future__ import annotations

import math
import struct

import numpy as np

from ckptlib.format.values import decode, dumps, encode, loads


def through(value: object) -> object:
    return decode(loads(dumps(encode(value, "root"))))


def same(a: object, b: object) -> bool:
    """Equal types and bits, all the way down. NaN payloads of Python floats are not compared."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and same(a.item(), b.item())
    if isinstance(a, float):
        return (math.isnan(a) and math.isnan(b)) or struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, set | frozenset):
        rest = list(b)
        for item in a:
            match = next((i for i, other in enumerate(rest) if same(item, other)), None)
            if match is None:
                return False
            rest.pop(match)
        return not rest
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b
