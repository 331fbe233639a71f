"""Floating-point numbers of one width as those of another, as torch converts them. numpy has no bfloat16, so bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptlib.errors import UnsupportedState
from ckptlib.reading.arrays import Raw, raw_dtype

WORDS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    **{name: name for name in ("bfloat16", "float16", "float32")},
}
"""What a user may ask for."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""What is converted; all else stays as it is."""

_NAN = 0x7FC0


def dtype_of(word: str | None) -> str | None:
    """Raises ValueError for a word that is none."""
    if word is not None and word not in WORDS:
        raise ValueError(f"dtype {word!r}: expected bf16, fp16 or fp32")
    return None if word is None else WORDS[word]


def target_of(dtype: str, wanted: str | None) -> str:
    """What a tensor of this dtype becomes."""
    return wanted if wanted is not None and dtype in FLOATS else dtype


def cast(raw: Raw, wanted: str, name: str) -> Raw:
    """The same numbers in another dtype, by way of float32: each the nearest, ties to even.

    Raises UnsupportedState where a finite one would become infinite.
    """
    if raw.dtype == wanted:
        return raw
    values = _values(raw)
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32, copy=False)
        found = _to_bfloat16(single) if wanted == "bfloat16" else single.astype(wanted, copy=False)
    infinite = (found & 0x7FFF) == 0x7F80 if wanted == "bfloat16" else np.isinf(found)
    if infinite.any() and bool((infinite & np.isfinite(values)).any()):
        raise UnsupportedState(f"{name}: has numbers that {wanted} has none for: they would become infinite")
    return Raw(found.view(raw_dtype(wanted)), wanted)


def _values(raw: Raw) -> np.ndarray[Any, np.dtype[Any]]:
    if raw.dtype == "bfloat16":
        return (raw.array.astype(np.uint32) << 16).view(np.float32)
    return raw.array.view(raw.dtype)


def _to_bfloat16(single: np.ndarray[Any, np.dtype[Any]]) -> np.ndarray[Any, np.dtype[Any]]:
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(single)] = _NAN
    return rounded
