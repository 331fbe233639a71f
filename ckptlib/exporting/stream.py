"""Streams tensors from a checkpoint, some megabytes at a time: reads the next ones while the last are written."""

from __future__ import annotations

import math
import mmap
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from ckptlib.catalog.reading import GeneratorThreads
from ckptlib.exporting.casting import cast
from ckptlib.exporting.direct_file import DirectFile
from ckptlib.exporting.files import FilePlan, Item
from ckptlib.format import dtypes
from ckptlib.format.box import Box, boxes_of_range
from ckptlib.pages import PAGE_BYTES
from ckptlib.reading.arrays import Raw, raw_dtype
from ckptlib.reading.opened import CheckpointReader
from ckptlib.reading.reader import Want

BATCH_BYTES = 32 * 1024 * 1024
"""Bytes that are read at once, several times the size of chunks; two batches are in memory."""

CAST_ELEMENTS = 1 << 20
"""How many elements are converted at once, since converting takes several times their memory."""

ALIGNED = 64


class Wanted(NamedTuple):
    """Elements of a tensor that are read as one array."""

    item: Item
    shape: tuple[int, ...]
    """The shape of the array."""
    boxes: tuple[tuple[int, Box], ...]
    """Boxes of the tensor that fill the array, one after the other, each with the position of its first element."""

    @property
    def nbytes(self) -> int:
        """Bytes of the array in the saved dtype."""
        return math.prod(self.shape) * dtypes.itemsize(self.item.dtype_saved)


def read(opened: CheckpointReader, wanted: Iterable[Wanted]) -> Generator[tuple[Wanted, Raw], None, None]:
    """Reads arrays, in order. An array is overwritten when the next one is asked for. Raises as a read does."""
    buffers = [mmap.mmap(-1, BATCH_BYTES + PAGE_BYTES) for _ in range(2)]  # fresh memory costs more than the read
    waiting: tuple[Sequence[Wanted], Future[list[Raw]]] | None = None
    with GeneratorThreads(1, "ckptlib-export-read") as executor:
        for batch in batches(wanted):
            under_way = batch, executor.submit(_fill, opened, batch, buffers[0])
            if waiting is not None:
                yield from zip(waiting[0], waiting[1].result(), strict=True)
            waiting = under_way
            buffers.reverse()
        if waiting is not None:
            yield from zip(waiting[0], waiting[1].result(), strict=True)


def _fill(opened: CheckpointReader, batch: Sequence[Wanted], buffer: mmap.mmap) -> list[Raw]:
    found, wants = [], []
    for one, begin in zip(batch, _begins(batch), strict=True):
        item = one.item
        flat = np.frombuffer(buffer, raw_dtype(item.dtype_saved), math.prod(one.shape), begin)
        targets = tuple(
            (box, Raw(flat[first : first + box.numel].reshape(box.shape), item.dtype_saved))
            for first, box in one.boxes
            if box.numel
        )
        if targets:
            wants.append(Want(item.chosen.saved, targets))
        found.append(Raw(flat.reshape(one.shape), item.dtype_saved))
    if wants:
        opened.fill(wants)
    return found


def batches(wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    """Groups arrays into batches, in order, each of at most BATCH_BYTES. Pure."""
    batch: list[Wanted] = []
    end = 0
    for one in wanted:
        begin = _begin(end, one)
        if batch and begin + one.nbytes > BATCH_BYTES:
            yield batch
            batch, begin = [], 0
        batch.append(one)
        end = begin + one.nbytes
    if batch:
        yield batch


def _begins(batch: Iterable[Wanted]) -> Iterator[int]:
    end = 0
    for one in batch:
        begin = _begin(end, one)
        yield begin
        end = begin + one.nbytes


def _begin(end: int, one: Wanted) -> int:
    """Returns where an array begins in the buffer: on a page, as direct I/O needs, if it has at least a page."""
    return end + -end % (PAGE_BYTES if one.nbytes >= PAGE_BYTES else ALIGNED)


def pieces_of(items: Iterable[Item], begins: Callable[[str], Sequence[int]]) -> Iterator[Wanted]:
    """Yields tensors in order, in runs of elements of at most a batch each. Pure.

    `begins`: returns the elements of a saved tensor before which it is cut if possible, ascending.
    """
    for item in items:
        most = BATCH_BYTES // dtypes.itemsize(item.dtype_saved)
        cuts = begins(item.chosen.saved) if item.numel > most else ()
        first = 0
        while first < item.numel:
            stop = min(first + most, item.numel)
            if stop < item.numel:
                at = bisect_right(cuts, stop)
                stop = cuts[at - 1] if at and cuts[at - 1] > first else stop
            runs = boxes_of_range(item.shape, first, stop)
            yield Wanted(item, (stop - first,), tuple((at - first, box) for at, box in runs))
            first = stop


def converted(item: Item, raw: Raw) -> Iterator[Raw]:
    """Yields the array in the file's dtype, some elements at a time."""
    if raw.dtype == item.dtype:
        yield raw
        return
    flat = raw.array.reshape(-1)
    for first in range(0, flat.size, CAST_ELEMENTS):
        yield cast(Raw(flat[first : first + CAST_ELEMENTS], raw.dtype), item.dtype, item.chosen.saved)


def write(opened: CheckpointReader, plan: FilePlan, fd: int, progress: Callable[[int], None]) -> None:
    """Writes a file's head and its tensors. Raises as a read does, UnsupportedState as `cast` does, OSError."""
    begins = {item.chosen.name: offset for item, offset in zip(plan.items, plan.offsets, strict=True)}
    with DirectFile(fd) as file:
        file.write(plan.head)
        for one, raw in read(opened, pieces_of(plan.items, opened.chunk_begins)):
            file.write(bytes(max(0, begins[one.item.chosen.name] - file.nbytes)))
            for some in converted(one.item, raw):
                progress(file.write(some.data))
        file.finish()
