"""Tensors from a checkpoint into a file, some megabytes at a time: a batch is read while the last one is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from ckptlib.exporting.casting import cast
from ckptlib.exporting.files import FilePlan, Item
from ckptlib.format import dtypes
from ckptlib.format.box import boxes_of_range
from ckptlib.reading.arrays import Raw, raw_dtype
from ckptlib.reading.opened import CheckpointReader
from ckptlib.reading.reader import Want

BATCH_BYTES = 32 * 1024 * 1024
"""Read at once; three are in memory. A multiple of the size of chunks, so that few are read twice."""

CAST_ELEMENTS = 1 << 20
"""Converted at once, since that takes several times their memory."""


class Piece(NamedTuple):
    """Elements of a tensor that follow one another."""

    item: Item
    first: int
    numel: int
    at: int
    """Of the first one, in the file."""


def pieces_of(plan: FilePlan) -> Iterator[Piece]:
    """Of all tensors of a file, in order, none of more than a batch."""
    for item, offset in zip(plan.items, plan.offsets, strict=True):
        most = BATCH_BYTES // dtypes.itemsize(item.dtype_saved)
        itemsize = dtypes.itemsize(item.dtype)
        for first in range(0, item.numel, most):
            yield Piece(item, first, min(most, item.numel - first), offset + first * itemsize)


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """In order, each of at most BATCH_BYTES as they are saved."""
    batch: list[Piece] = []
    filled = 0
    for piece in pieces:
        nbytes = piece.numel * dtypes.itemsize(piece.item.dtype_saved)
        if batch and filled + nbytes > BATCH_BYTES:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += nbytes
    if batch:
        yield batch


def write(opened: CheckpointReader, plan: FilePlan, fd: int, progress: Callable[[int], None]) -> None:
    """Writes a file's head and its tensors. Raises as a read does, UnsupportedState as `cast` does, OSError."""
    _write_all(fd, plan.head, 0)
    waiting: Future[None] | None = None
    with ThreadPoolExecutor(1, "ckptlib-export") as executor:
        for batch in batches(pieces_of(plan)):
            raws = _read(opened, batch)
            if waiting is not None:
                waiting.result()
            waiting = executor.submit(_write_batch, fd, batch, raws, progress)
        if waiting is not None:
            waiting.result()


def _read(opened: CheckpointReader, batch: Sequence[Piece]) -> list[Raw]:
    found, wants = [], []
    for piece in batch:
        dtype, shape = piece.item.dtype_saved, piece.item.shape
        flat = np.empty(piece.numel, raw_dtype(dtype))
        found.append(Raw(flat, dtype))
        targets = []
        for first, box in boxes_of_range(shape, piece.first, piece.first + piece.numel):
            begin = first - piece.first
            targets.append((box, Raw(flat[begin : begin + box.numel].reshape(box.shape), dtype)))
        wants.append(Want(piece.item.chosen.saved, tuple(targets)))
    opened.fill(wants)
    return found


def _write_batch(fd: int, batch: Sequence[Piece], raws: Sequence[Raw], progress: Callable[[int], None]) -> None:
    for piece, raw in zip(batch, raws, strict=True):
        at, most = piece.at, piece.numel if piece.item.dtype == raw.dtype else CAST_ELEMENTS
        for first in range(0, piece.numel, most):
            some = Raw(raw.array[first : first + most], raw.dtype)
            data = cast(some, piece.item.dtype, piece.item.chosen.saved).data
            _write_all(fd, data, at)
            at += len(data)
            progress(len(data))


def _write_all(fd: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, at)
        view, at = view[done:], at + done
