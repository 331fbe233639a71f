"""Views a tensor's memory as bytes."""

from __future__ import annotations

import torch


def is_bytes(tensor: torch.Tensor) -> bool:
    """Returns whether the memory is the value: contiguous, with no conjugation or negation pending."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the same elements in a dtype that torch copies in any order: it has no kernel for float4 that is
    transposed."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose memory is the value of this one: itself, or one made on its device by the current stream,
    maybe of another dtype. Detached.

    If left to `copy_`, a pending conjugation or negation is applied to the target: on the host, before the bytes are
    there.
    """
    plain = tensor.detach()
    return plain if is_bytes(plain) else copyable(plain.resolve_conj().resolve_neg()).contiguous()


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a tensor that `is_bytes`, as a 1-d view of dtype uint8, whatever the dtype."""
    # not view(-1): a dim of size 1 may have any stride, which view(dtype) checks
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
