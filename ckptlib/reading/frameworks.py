"""Presents elements of a checkpoint as arrays or tensors of a framework, which is imported for the first one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptlib.errors import StateMismatch, UnsupportedState
from ckptlib.reading.arrays import Raw

NUMPY, TORCH = "numpy", "pt"
_NAMES = {"numpy": NUMPY, "np": NUMPY, "pt": TORCH, "torch": TORCH, "pytorch": TORCH}
"""Names of frameworks, as in safetensors."""

_NUMPY = {
    "bool": "?",
    **{name: name for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")},
    **{name: name for name in ("float16", "float32", "float64", "complex64", "complex128")},
}


def framework_of(name: str | None) -> str:
    """Returns the framework of this name; None: torch if it is installed, else numpy. Raises ValueError for an unknown
    name, ImportError for torch if it is not installed."""
    if name is None:
        return TORCH if _has_torch() else NUMPY
    if name not in _NAMES:
        raise ValueError(f"framework {name!r}: expected 'pt' or 'numpy'")
    if _NAMES[name] == TORCH and not _has_torch():
        raise ImportError(
            "this needs torch, which is not installed; without it ask for framework='numpy', or export to safetensors "
            "or hf"
        )
    return _NAMES[name]


def _has_torch() -> bool:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def check(framework: str, name: str, dtype: str) -> None:
    """Raises UnsupportedState for a tensor whose elements the framework lacks; called before it is read."""
    if framework == NUMPY and dtype not in _NUMPY:
        raise UnsupportedState(
            f"{name}: numpy has no {dtype}. Install torch and ask for framework='pt', or convert: "
            "ckptlib export --dtype fp32"
        )
    if framework == TORCH:
        torch_dtype(name, dtype)


def present(framework: str, name: str, raw: Raw) -> Any:
    """Returns the same memory as an array or a tensor."""
    if framework == NUMPY:
        return raw.array.view(_NUMPY[raw.dtype])
    import torch

    dtype = torch_dtype(name, raw.dtype)
    if raw.array.size == 0:
        return torch.empty(raw.array.shape, dtype=dtype)
    return torch.from_numpy(raw.array.reshape(-1).view(np.uint8)).view(dtype).reshape(raw.array.shape)


def copied(framework: str, part: Any) -> Any:
    """Returns a copy of the elements: a view would keep all of the memory that it is a part of."""
    return part.copy() if framework == NUMPY else part.clone()


def torch_dtype(name: str, dtype: str) -> Any:
    import torch

    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise StateMismatch(f"{name}: torch {torch.__version__} has no {dtype}; use a newer one")
    return found
