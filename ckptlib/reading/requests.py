"""Requests read chunks that lie side by side in a pack at once, check them, and put them where they are wanted."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import EllipsisType
from typing import NamedTuple, TypeAlias

import numpy as np
from typing_extensions import override

from ckptlib.catalog.chunks import ReadInto, decode_chunk
from ckptlib.catalog.shards import PartIndex
from ckptlib.errors import CorruptData, FormatError
from ckptlib.format import dtypes
from ckptlib.format.box import Box, Run, boxes_of_range
from ckptlib.format.places import Coding
from ckptlib.pages import round_up
from ckptlib.stores.io_limits import DIRECT_FROM_BYTES, GAP_BYTES, IoLimits


class ByteMove(NamedTuple):
    """A stretch of a chunk that goes into host memory as it is."""

    first: int
    """Its first byte in the chunk."""
    nbytes: int
    address: int


Index = tuple[slice | EllipsisType, ...]

WHOLE: Index = (...,)


class ByteCopy(NamedTuple):  # there may be hundreds of thousands
    """A contiguous stretch of a chunk, and where it goes."""

    first: int
    """Its first byte in the chunk."""
    dtype: str
    """dtype of its elements, by torch's name."""
    shape: tuple[int, ...]
    """Shape of the stretch, as it lies in the chunk."""
    inside: Index
    """The wanted part of the stretch."""
    target: object
    """Memory of the kind that the read's `Landing` places."""
    outside: Index
    """Index into the target, which the thread that brings the bytes applies when they are there."""

    @property
    def nbytes(self) -> int:
        """Bytes of the stretch."""
        return dtypes.itemsize(self.dtype) * math.prod(self.shape)


class ChunkRead:
    """One chunk to be read, checked and placed."""

    __slots__ = ("boxes", "chunk", "coding", "nbytes", "offset", "pack", "runs", "share", "stored", "to_host")

    def __init__(self, share: PartIndex, chunk: int) -> None:
        part = share.part
        self.share, self.chunk = share, chunk
        self.pack = part.packs[part.table.packs[chunk]].key
        self.offset, self.nbytes = part.table.offsets[chunk], part.table.nbytes[chunk]
        self.stored = part.stored[chunk]
        """Bytes in the pack."""
        self.coding: Coding | None = part.codings.get(chunk)
        """Coding of the chunk in the pack; None: its own bytes."""
        self.to_host: list[Taken] = []
        """Runs that go into host memory as they are."""
        self.runs: list[Taken] = []
        """All other runs."""
        self.boxes: list[ByteCopy] = []
        """Copies that are no runs."""

    @property
    def moves(self) -> Iterator[ByteMove]:
        return itertools.starmap(_move_of, self.to_host)

    @property
    def copies(self) -> list[ByteCopy]:
        """All copies except `to_host`, made anew each time: whoever places the chunk asks for them, and keeps none."""
        return [*itertools.starmap(_copy_of, self.runs), *self.boxes]

    @property
    def digest(self) -> str:
        return self.share.part.digests[self.chunk]

    @property
    def address(self) -> int | None:
        """Address of the target's memory, if the chunk's bytes are exactly that, uncoded in the pack; else None."""
        if len(self.to_host) != 1 or self.runs or self.boxes or self.coding is not None:
            return None
        (move,) = self.moves
        return move.address if move.nbytes == self.nbytes else None

    @override
    def __str__(self) -> str:
        """Returns the tensors that lie in it, for messages."""
        return self.share.part.table.describe(self.chunk, self.share.layout)


class Target(ABC):
    """Memory to be filled with a box of a tensor."""

    __slots__ = ("address", "dtype", "is_row_major", "memory", "numel")

    def __init__(self, memory: object, dtype: str, numel: int, is_row_major: bool, address: int | None) -> None:
        self.memory = memory
        self.dtype, self.numel, self.is_row_major = dtype, numel, is_row_major
        self.address = address
        """Address of the memory if that is on the host and its bytes are the value; else None."""

    def takes_bytes(self, dtype: str) -> bool:
        """Returns whether elements of this dtype go there as they are, by address."""
        return self.address is not None and self.dtype == dtype

    @abstractmethod
    def flat(self) -> object:
        """Returns the same memory with one dim; it is row-major."""


Taken: TypeAlias = tuple[Target, Run, int, str]
"""A run of elements from a chunk to a target, row-major in both: the target; the run, whose `first` counts in the
shard, or in the part of it that the chunk has, and whose `at` counts in the target; the bytes of the chunk before that;
the dtype. A plain tuple, of objects that others share: a plan of a thousand ranks has hundreds of thousands.
"""


def _move_of(target: Target, run: Run, skipped: int, dtype: str) -> ByteMove:
    assert target.address is not None
    itemsize = dtypes.itemsize(dtype)
    return ByteMove(skipped + run.first * itemsize, run.numel * itemsize, target.address + run.at * itemsize)


def _copy_of(target: Target, run: Run, skipped: int, dtype: str) -> ByteCopy:
    first, outside = skipped + run.first * dtypes.itemsize(dtype), (slice(run.at, run.at + run.numel),)
    return ByteCopy(first, dtype, (run.numel,), WHOLE, target.flat(), outside)


class Landing(ABC):
    """Buffers for chunks of one read, and where they are placed, for many threads. In host memory."""

    def buffer(self, nbytes: int, reads: Sequence[ChunkRead]) -> memoryview:
        """Returns the memory where the bytes of these reads are put together before they are placed."""
        return thread_buffer("placed", nbytes)

    def place(self, read: ChunkRead, data: memoryview, start: int) -> None:
        """Puts a checked chunk where it is wanted. `start`: position of its bytes in the buffer."""
        move_out(read, data)
        for copy in read.copies:
            self.put(copy, data[copy.first : copy.first + copy.nbytes])

    @abstractmethod
    def put(self, copy: ByteCopy, data: memoryview) -> None:
        """Copies the wanted part of a stretch whose bytes are `data`."""

    def finish(self, buffer: memoryview) -> None:  # noqa: B027  (arrays are there when they were placed)
        """Called when all chunks of a buffer were placed."""

    def close(self) -> None:  # noqa: B027
        """Waits until nothing is under way any more."""


class Request:
    """Neighbouring chunks in a pack, which are read at once."""

    def __init__(self, read: ChunkRead, limits: IoLimits) -> None:
        self.reads = [read]
        self.pack, self.offset, self.nbytes = read.pack, read.offset, read.stored
        self.base = read.address
        """Address where the bytes go as they are, one after the other; None if they do not."""
        self._largest = read.stored
        self._nbytes_decoded = read.nbytes
        self._limits = limits

    @property
    def coded(self) -> bool:
        """Whether it reads frames; either all of its chunks are coded, or none."""
        return self.reads[0].coding is not None

    @property
    def direct(self) -> bool:
        """Whether it is worth reading straight into the targets."""
        return self.base is not None and self.nbytes >= self._limits.direct_from

    def take(self, read: ChunkRead) -> bool:
        """Adds the next chunk in the order of packs if it fits this request. Returns whether it did."""
        nbytes, limits = read.offset + read.stored - self.offset, self._limits
        gap = nbytes - read.stored - self.nbytes
        if read.pack != self.pack or nbytes > limits.most or not 0 <= gap <= GAP_BYTES:
            return False
        if (read.coding is not None) != self.coded or self._nbytes_decoded + read.nbytes > limits.most:
            return False
        goes_on = gap == 0 and self.base is not None and read.address == self.base + self.nbytes
        largest = max(self._largest, read.stored)
        if not goes_on:
            if self.direct or largest >= limits.direct_from:
                return False
            self.base = None
        self.reads.append(read)
        self._nbytes_decoded += read.nbytes
        self.nbytes, self._largest = nbytes, largest
        return True

    @property
    def start(self) -> int:
        """First byte that is read. Chunks that go through a buffer keep the alignment that they have in the pack."""
        return self.offset if self.direct else self.offset - self.offset % 64

    def buffer(self, landing: Landing) -> memoryview:
        """Returns the memory to read into: the targets', or a buffer of this thread's."""
        if self.direct:
            return memoryview((ctypes.c_char * self.nbytes).from_address(self.base or 0)).cast("B")
        nbytes = self.offset + self.nbytes - self.start
        return thread_buffer("read", nbytes) if self.coded else landing.buffer(nbytes, self.reads)

    def _decode(self, frames: memoryview, fetch: ReadInto, landing: Landing) -> tuple[memoryview, list[int]]:
        """Returns the bytes of all chunks, and where each begins. Raises CorruptData that names the tensor."""
        starts = [*itertools.accumulate((round_up(read.nbytes) for read in self.reads), initial=0)]
        buffer = landing.buffer(starts[-1], self.reads)
        for read, start in zip(self.reads, starts, strict=False):
            frame = frames[read.offset - self.start : read.offset - self.start + read.stored]
            try:
                decode_chunk(fetch, read.share.part, read.chunk, frame, buffer[start : start + read.nbytes])
            except (CorruptData, FormatError) as error:
                raise CorruptData(f"{read}: {read.pack} [{read.offset}:+{read.stored}]: {error}") from error
        return buffer, starts

    def carry_out(
        self, fetch: ReadInto, digest: Callable[[Iterable[memoryview]], str], step: int, landing: Landing
    ) -> int:
        """Reads the chunks, checks each, and puts it where it is wanted; returns the bytes read. Raises CorruptData,
        and what `fetch` raises.

        `step` is for messages. Copies to a device have arrived when `landing` is closed.
        """
        buffer, starts = self.buffer(landing), [read.offset - self.start for read in self.reads]
        nbytes = len(buffer)
        piecemeal = self._limits.piece is not None and not self.coded
        if not piecemeal:
            fetch(self.pack, self.start, buffer)
        if self.coded:
            buffer, starts = self._decode(buffer, fetch, landing)
        for read, start in zip(self.reads, starts, strict=False):
            data = buffer[start : start + read.nbytes]
            found = digest(self._arriving(read, data, fetch) if piecemeal else [data])
            if found != read.digest:
                raise CorruptData(
                    f"{read}: {read.pack} [{read.offset}:+{read.nbytes}] does not match {read.digest} (got {found}); "
                    "the object was altered after it was written. Try an earlier step than "
                    f"{step}, or: ckptlib verify URL {step}"
                )
            if not self.direct:
                landing.place(read, data, start)
        if not self.direct:
            landing.finish(buffer)
        return nbytes

    def _arriving(self, read: ChunkRead, data: memoryview, fetch: ReadInto) -> Iterator[memoryview]:
        """Yields the bytes of a chunk, each piece as soon as it is there."""
        piece = self._limits.piece or read.nbytes
        for at in range(0, read.nbytes, piece):
            arrived = data[at : at + piece]
            fetch(self.pack, read.offset + at, arrived)
            yield arrived


def copies_of(
    box: Box,
    first: int,
    last: int,
    wanted: Box,
    target: object,
    skipped: int,
    dtype: str,
) -> Iterable[ByteCopy]:
    """Yields the copies of elements [first, last) of a shard that fills `box` into `target`, which fills `wanted`.

    `skipped`: bytes of the chunk that lie before them.
    """
    itemsize = dtypes.itemsize(dtype)
    for flat, local in boxes_of_range(box.shape, first, last):
        here = Box(tuple(o + b for o, b in zip(local.offset, box.offset, strict=True)), local.shape)
        common = here.intersect(wanted)
        if common is not None:
            yield ByteCopy(
                skipped + (flat - first) * itemsize,
                dtype,
                here.shape,
                common.relative_to(here.offset).slices() or WHOLE,
                target,
                common.relative_to(wanted.offset).slices() or WHOLE,
            )


def merge(reads: Iterable[ChunkRead], limits: IoLimits) -> list[Request]:
    """Returns requests for the reads, in the order of their packs; neighbours share one request."""
    requests: list[Request] = []
    for read in sorted(reads, key=lambda r: (r.pack, r.offset)):
        if not (requests and requests[-1].take(read)):
            requests.append(Request(read, limits))
    return requests


_local = threading.local()


def thread_buffer(use: str, nbytes: int) -> memoryview:
    """Returns this thread's buffer for a use: made once and reused, since fresh memory costs more than the read."""
    held: np.ndarray | None = getattr(_local, use, None)
    if held is None or held.nbytes < nbytes + 64:
        held = np.empty(max(nbytes, 1 << 20) + 64, dtype=np.uint8)
        setattr(_local, use, held)
    skip = -held.ctypes.data % 64
    return held.data[skip : skip + nbytes]


_move: Callable[[int, int, int], int] = ctypes.PyDLL(None).memmove
"""Keeps the GIL, unlike ctypes.memmove: threads that released it for every small tensor would wait for one another."""
_move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]  # type: ignore[attr-defined]


def move_out(read: ChunkRead, data: memoryview) -> None:
    """Copies the moves of a chunk into host memory."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(data))
    for first, nbytes, address in read.moves:
        move = _move if nbytes < DIRECT_FROM_BYTES else ctypes.memmove
        move(address, base + first, nbytes)
