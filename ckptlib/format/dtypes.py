"""Element types by torch's names: their sizes and their safetensors names. No torch."""

from __future__ import annotations

from ckptlib.errors import FormatError

_DTYPES: dict[str, tuple[int, str]] = {
    "bool": (1, "BOOL"),
    "uint8": (1, "U8"),
    "int8": (1, "I8"),
    "uint16": (2, "U16"),
    "int16": (2, "I16"),
    "uint32": (4, "U32"),
    "int32": (4, "I32"),
    "uint64": (8, "U64"),
    "int64": (8, "I64"),
    "float16": (2, "F16"),
    "bfloat16": (2, "BF16"),
    "float32": (4, "F32"),
    "float64": (8, "F64"),
    "complex64": (8, "C64"),
    "float8_e4m3fn": (1, "F8_E4M3"),
    "float8_e5m2": (1, "F8_E5M2"),
    "float8_e8m0fnu": (1, "F8_E8M0"),
    # dtypes that safetensors lacks are stored as U8, with their names in the pack's metadata
    "complex32": (4, "U8"),
    "complex128": (16, "U8"),
    "float8_e4m3fnuz": (1, "U8"),
    "float8_e5m2fnuz": (1, "U8"),
    "float4_e2m1fn_x2": (1, "U8"),
}


def known(dtype: str) -> bool:
    """Returns whether torch's dtype of this name can be saved."""
    return dtype in _DTYPES


def itemsize(dtype: str) -> int:
    """Returns the bytes per element. Raises FormatError for a name that is no dtype."""
    return _lookup(dtype)[0]


def safetensors_name(dtype: str) -> str:
    """Returns the name in a safetensors header; "U8" if the format has no name for the dtype."""
    return _lookup(dtype)[1]


def has_own_word(dtype: str) -> bool:
    """Returns whether safetensors has a name for the dtype."""
    return dtype == "uint8" or safetensors_name(dtype) != "U8"


def _lookup(dtype: str) -> tuple[int, str]:
    try:
        return _DTYPES[dtype]
    except KeyError:
        raise FormatError(f"dtype {dtype!r} is unknown to this version of ckptlib; update ckptlib") from None
