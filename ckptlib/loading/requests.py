"""Requests: chunks that lie side by side in a pack, read at once, checked, and put where they are wanted."""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import EllipsisType
from typing import NamedTuple

import numpy as np
import torch
from typing_extensions import override

from ckptlib.catalog.chunks import ReadInto, decode_chunk
from ckptlib.catalog.shards import PartIndex
from ckptlib.devices import accelerator
from ckptlib.errors import CorruptData, FormatError
from ckptlib.format.box import Box, boxes_of_range
from ckptlib.format.places import Coding
from ckptlib.loading.landing import Landing
from ckptlib.pages import round_up
from ckptlib.state.raw_bytes import bytes_of, copyable, is_bytes
from ckptlib.stores.io_limits import DIRECT_FROM_BYTES, GAP_BYTES, IoLimits


class ByteMove(NamedTuple):
    """A stretch of a chunk that goes into memory of the host as it is."""

    first: int
    """Byte of the chunk."""
    nbytes: int
    address: int


Index = tuple[slice | EllipsisType, ...]

WHOLE: Index = (...,)


class ByteCopy(NamedTuple):  # there may be hundreds of thousands
    """A contiguous stretch of a chunk, and where it goes."""

    first: int
    """Byte of the chunk."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the stretch, as it lies in the chunk."""
    inside: Index
    """What of that is wanted."""
    target: torch.Tensor
    outside: Index
    """And where in the target: it is cut when the bytes are there, by the thread that brings them."""

    @property
    def nbytes(self) -> int:
        """Of the stretch."""
        return self.dtype.itemsize * math.prod(self.shape)


class Landed(NamedTuple):
    """A stretch that was read into a buffer, and goes to a device."""

    at: int
    """Its first byte in the buffer."""
    copy: ByteCopy


class ChunkRead:
    """One chunk to be read, checked and placed."""

    __slots__ = ("chunk", "copies", "moves", "nbytes", "offset", "pack", "share", "stored")

    def __init__(self, share: PartIndex, chunk: int) -> None:
        part = share.part
        self.share, self.chunk = share, chunk
        self.pack = part.packs[part.table.packs[chunk]].key
        self.offset, self.nbytes = part.table.offsets[chunk], part.table.nbytes[chunk]
        self.stored = part.stored[chunk]
        """Bytes in the pack."""
        self.moves: list[ByteMove] = []
        self.copies: list[ByteCopy] = []

    @property
    def digest(self) -> str:
        return self.share.part.digests[self.chunk]

    @property
    def coding(self) -> Coding | None:
        """What the pack has instead of the chunk's bytes."""
        return self.share.part.codings.get(self.chunk)

    @property
    def address(self) -> int | None:
        """Of the target's memory, when the chunk's bytes are exactly that, and the pack has them as they are."""
        if self.copies or len(self.moves) != 1 or self.moves[0].nbytes != self.nbytes or self.coding is not None:
            return None
        return self.moves[0].address

    @override
    def __str__(self) -> str:
        """The tensors that lie in it, for messages."""
        return self.share.part.table.describe(self.chunk, self.share.layout)


class Target:
    """A tensor to be filled."""

    __slots__ = ("_flat", "address", "is_row_major", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._flat: torch.Tensor | None = None
        self.is_row_major = tensor.is_contiguous()
        on_host = self.is_row_major and accelerator.device_of(tensor) is None
        self.address = tensor.data_ptr() if on_host and is_bytes(tensor) else None
        """Of its memory, when that is its value, and the host's."""

    def take(self, read: ChunkRead, skipped: int, at: int, numel: int, dtype: torch.dtype) -> None:
        """Its elements from `at` on, row-major, are what lies behind `skipped` bytes of a chunk."""
        if self.address is not None and self.tensor.dtype == dtype:
            read.moves.append(ByteMove(skipped, numel * dtype.itemsize, self.address + at * dtype.itemsize))
            return
        if self._flat is None:
            self._flat = self.tensor.view(-1)
        shape, outside = _stretch(at, numel)
        read.copies.append(ByteCopy(skipped, dtype, shape, WHOLE, self._flat, outside))


@lru_cache(maxsize=1024)  # layers are alike, and every object of a plan is one more for the collector to search
def _stretch(at: int, numel: int) -> tuple[tuple[int, ...], Index]:
    """Shape and place of elements that follow one another."""
    return (numel,), (slice(at, at + numel),)


class Request:
    """Chunks that one request reads: neighbours in a pack."""

    def __init__(self, read: ChunkRead, limits: IoLimits) -> None:
        self.reads = [read]
        self.pack, self.offset, self.nbytes = read.pack, read.offset, read.stored
        self.base = read.address
        """Where the bytes go as they are, one after the other; None: they do not."""
        self._largest = read.stored
        self._nbytes_decoded = read.nbytes
        self._limits = limits

    @property
    def coded(self) -> bool:
        """Whether what is read are frames; all of its chunks are stored so, or none."""
        return self.reads[0].coding is not None

    @property
    def direct(self) -> bool:
        """Whether it is worth reading straight into the targets."""
        return self.base is not None and self.nbytes >= self._limits.direct_from

    def take(self, read: ChunkRead) -> bool:
        """Whether the next chunk in the order of packs joins this request."""
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
        """What is to be read into: the memory of the targets, or a buffer of this thread's."""
        if self.direct:
            return memoryview((ctypes.c_char * self.nbytes).from_address(self.base or 0)).cast("B")
        nbytes = self.offset + self.nbytes - self.start
        return _buffer("read", nbytes) if self.coded else self._buffer(nbytes, landing)

    def _buffer(self, nbytes: int, landing: Landing) -> memoryview:
        """Where the bytes of chunks are before they are placed."""
        if not landing.needed:
            return _buffer("placed", nbytes)
        device = next((d for read in self.reads for copy in read.copies if (d := landing.device(copy.target))), None)
        return _buffer("placed", nbytes) if device is None else landing.buffer(nbytes, device)

    def _decode(self, frames: memoryview, fetch: ReadInto, landing: Landing) -> tuple[memoryview, list[int]]:
        """The bytes of all chunks, and where each begins. Raises CorruptData that names the tensor."""
        starts = [*itertools.accumulate((round_up(read.nbytes) for read in self.reads), initial=0)]
        buffer = self._buffer(starts[-1], landing)
        for read, start in zip(self.reads, starts, strict=False):
            frame = frames[read.offset - self.start : read.offset - self.start + read.stored]
            try:
                decode_chunk(fetch, read.share.part, read.chunk, frame, buffer[start : start + read.nbytes])
            except (CorruptData, FormatError) as error:
                raise CorruptData(f"{read}: {read.pack} [{read.offset}:+{read.stored}]: {error}") from error
        return buffer, starts

    def place(
        self,
        buffer: memoryview,
        fetch: ReadInto,
        verify: Callable[[memoryview], str],
        step: int,
        landing: Landing,
    ) -> None:
        """Checks what was read, chunk by chunk, then puts it where it is wanted. Raises CorruptData.

        `fetch` brings what frames were made against; `verify` gives the digest of a chunk; `step` is for messages. What
        goes to a device has arrived when `landing` is closed.
        """
        landed: dict[torch.device, list[Landed]] = {}
        starts = [read.offset - self.start for read in self.reads]
        if self.coded:
            buffer, starts = self._decode(buffer, fetch, landing)
        for read, start in zip(self.reads, starts, strict=False):
            data = buffer[start : start + read.nbytes]
            found = verify(data)
            if found != read.digest:
                raise CorruptData(
                    f"{read}: {read.pack} [{read.offset}:+{read.nbytes}] does not match {read.digest} (got {found}); "
                    f"the object was altered after it was written. Try an earlier step than {step}, or: ckptlib verify"
                )
            if not self.direct:
                for copy, device in _place(read, data, landing):
                    landed.setdefault(device, []).append(Landed(start + copy.first, copy))
        for device, copies in landed.items():
            with landing.on(device):
                _land(torch.frombuffer(buffer, dtype=torch.uint8), copies, device)


def copies_of(
    box: Box,
    first: int,
    last: int,
    wanted: Box,
    target: torch.Tensor,
    skipped: int,
    dtype: torch.dtype,
) -> Iterable[ByteCopy]:
    """How elements [first, last) of a shard that fills `box` go into `target`, which fills `wanted`.

    `skipped`: bytes of the chunk that lie before them.
    """
    for flat, local in boxes_of_range(box.shape, first, last):
        here = Box(tuple(o + b for o, b in zip(local.offset, box.offset, strict=True)), local.shape)
        common = here.intersect(wanted)
        if common is not None:
            yield ByteCopy(
                skipped + (flat - first) * dtype.itemsize,
                dtype,
                here.shape,
                common.relative_to(here.offset).slices() or WHOLE,
                target,
                common.relative_to(wanted.offset).slices() or WHOLE,
            )


def merge(reads: Iterable[ChunkRead], limits: IoLimits) -> list[Request]:
    """Reads in the order of their packs, neighbours together in one request."""
    requests: list[Request] = []
    for read in sorted(reads, key=lambda r: (r.pack, r.offset)):
        if not (requests and requests[-1].take(read)):
            requests.append(Request(read, limits))
    return requests


_local = threading.local()


def _buffer(use: str, nbytes: int) -> memoryview:
    """This thread's buffer for a use: made once and reused, since fresh memory costs more than the read."""
    held: np.ndarray | None = getattr(_local, use, None)
    if held is None or held.nbytes < nbytes + 64:
        held = np.empty(max(nbytes, 1 << 20) + 64, dtype=np.uint8)
        setattr(_local, use, held)
    skip = -held.ctypes.data % 64
    return held.data[skip : skip + nbytes]


_move: Callable[[int, int, int], int] = ctypes.PyDLL(None).memmove
"""Keeps the GIL, unlike ctypes.memmove: threads that gave it up for every small tensor would wait for one another."""
_move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]  # type: ignore[attr-defined]


@torch.inference_mode()  # else a target that was made in it, such as a whole model, could not be written to
def _place(read: ChunkRead, data: memoryview, landing: Landing) -> list[tuple[ByteCopy, torch.device]]:
    """Puts a chunk where it is wanted on the host; returns what lands on devices."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(data))
    for first, nbytes, address in read.moves:
        move = _move if nbytes < DIRECT_FROM_BYTES else ctypes.memmove
        move(address, base + first, nbytes)
    landed = []
    for copy in read.copies:
        device = landing.device(copy.target)
        if device is not None:
            landed.append((copy, device))
            continue
        stretch = torch.frombuffer(data[copy.first : copy.first + copy.nbytes], dtype=torch.uint8)
        _cut_into(copy.target, stretch, copy)
    return landed


@torch.inference_mode()
def _land(buffer: torch.Tensor, copies: list[Landed], device: torch.device) -> None:
    """From a pinned buffer to a device; on the current stream.

    In one piece, unless it is for one tensor that takes it as it is. The device does the rest: a dtype that differs
    would be cast by the host first.
    """
    if len(copies) == 1:
        at, copy = copies[0]
        target = copy.target[copy.outside]
        if copy.inside == WHOLE and copy.dtype == target.dtype and is_bytes(target):
            bytes_of(target).copy_(buffer[at : at + copy.nbytes], non_blocking=True)
            return
    first, stop = min(at for at, _ in copies), max(at + copy.nbytes for at, copy in copies)
    landed = torch.empty(stop - first, dtype=torch.uint8, device=device)
    landed.copy_(buffer[first:stop], non_blocking=True)
    for at, copy in copies:
        stretch = landed[at - first : at - first + copy.nbytes]
        _cut_into(
            copy.target, stretch if stretch.storage_offset() % copy.dtype.itemsize == 0 else stretch.clone(), copy
        )


def _cut_into(whole: torch.Tensor, stretch: torch.Tensor, copy: ByteCopy) -> None:
    """Of a stretch of a chunk, bytes where the target is, what is wanted."""
    source, target = stretch.view(copy.dtype).view(copy.shape)[copy.inside], whole[copy.outside]
    if source.dtype == target.dtype and source.is_contiguous() and is_bytes(target):
        # dtypes that torch cannot copy element by element are bytes all the same
        bytes_of(target).copy_(bytes_of(source))
    elif source.dtype == target.dtype:
        copyable(target).copy_(copyable(source))
    else:
        target.copy_(source)
