"""A file for `torch.load`: a flat dict of tensors. Only this file of the room needs torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ckptlib.exporting.files import FilePlan, Item
from ckptlib.exporting.outputs import Outputs
from ckptlib.exporting.stream import write
from ckptlib.format import dtypes
from ckptlib.reading.arrays import Raw, raw_dtype
from ckptlib.reading.frameworks import TORCH, framework_of, present
from ckptlib.reading.opened import CheckpointReader

ALIGNED = 64


def write_torch(
    opened: CheckpointReader,
    items: Sequence[Item],
    files: Outputs,
    name: str,
    progress: Callable[[int], None],
) -> None:
    """Streams the tensors into a file beside, and gives torch maps of that file: `torch.save` writes from memory."""
    framework_of(TORCH)
    import torch

    offsets, end = [], 0
    for item in items:
        offsets.append(end)
        end += -(-item.nbytes // ALIGNED) * ALIGNED
    raw = files.scratch(name)
    fd = os.open(raw, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(fd, 0, max(end, 1))
        write(opened, FilePlan(tuple(items), b"", tuple(offsets), end), fd, progress)
    finally:
        os.close(fd)
    found: dict[str, Any] = {}
    for item, offset in zip(items, offsets, strict=True):
        tensor = _mapped(str(raw), item, offset)
        found.update(dict.fromkeys((item.chosen.name, *item.chosen.ties), tensor))
    path = files.beside(name)
    torch.save(found, path)
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mapped(path: str, item: Item, offset: int) -> Any:
    dtype = raw_dtype(item.dtype)
    assert dtype.itemsize == dtypes.itemsize(item.dtype)
    if not item.numel:
        return present(TORCH, item.chosen.saved, Raw(np.empty(item.shape, dtype), item.dtype))
    # copy-on-write: torch warns of memory that it may not write to
    array = np.memmap(path, dtype, "c", offset, (item.numel,))
    return present(TORCH, item.chosen.saved, Raw(np.asarray(array).reshape(item.shape), item.dtype))
