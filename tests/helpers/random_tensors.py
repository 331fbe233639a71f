"""Tensors of any dtype whose bits are drawn at random, NaN included."""

from __future__ import annotations

import torch

RANDOM = torch.Generator().manual_seed(0)


def any_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Every bit random: NaNs of all payloads, denormals, negative zeros."""
    count = torch.empty(shape, dtype=torch.uint8).numel() * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8, generator=RANDOM)
    return raw.view(dtype).view(shape)
