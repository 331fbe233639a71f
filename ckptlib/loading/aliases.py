"""Tensors of a state that share memory: elements of one tensor, and one tensor on top of another."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from ckptlib.format.box import Box


def repeats(tensor: torch.Tensor) -> bool:
    """Returns whether elements of a tensor share memory, as in an expanded one: it cannot hold all values."""
    if tensor.is_contiguous():  # first: there may be thousands
        return False
    dims = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach, apart = 0, True
    for step, size in dims:
        apart = apart and step > reach
        reach += step * (size - 1)
    if apart or dims[0][0] == 0 or reach + 1 < tensor.numel():  # each step is beyond all before; or too little room
        return not apart
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
    for step, size in dims:
        offsets = (offsets[:, None] + step * torch.arange(size, device="cpu")).flatten()
    return not bool(offsets.sort().values.diff().all())


def place(pieces: Sequence[tuple[Box, torch.Tensor]]) -> Hashable:
    """Returns a key that is equal for pieces which lie on each other element by element. All pieces must have memory.

    Two tensors of one storage, such as a parameter and `parameter.detach()`, are equal by it, too.
    """
    return tuple(
        (box, piece.device, piece.data_ptr(), piece.dtype, piece.stride(), piece.is_conj(), piece.is_neg())
        for box, piece in pieces
    )
