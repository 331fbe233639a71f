"""Converts floating-point dtypes as torch does. numpy has no bfloat16, so that is converted by bits."""

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
"""The words for dtypes that a user may ask for."""

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that are converted; all others stay as they are."""

_NAN = 0x7FC0


def dtype_of(word: str | None) -> str | None:
    """Returns the dtype for a word. Raises ValueError for an unknown word."""
    if word is not None and word not in WORDS:
        raise ValueError(f"dtype {word!r}: expected bf16, fp16 or fp32")
    return None if word is None else WORDS[word]


def target_of(dtype: str, wanted: str | None) -> str:
    """Returns the dtype in which a tensor of this dtype is exported."""
    return wanted if wanted is not None and dtype in FLOATS else dtype


def cast(raw: Raw, wanted: str, name: str) -> Raw:
    """Returns the same numbers in another dtype, by way of float32, each rounded to the nearest, ties to even.

    Raises UnsupportedState if a finite number would become infinite.
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
