"""From the parts and packs of a committed step into tensors, whatever layout either side has.

A part's rows are the truth of what lies where; layouts only tell which parts to open. Every chunk is read whole and
checked against its digest before a byte of it is believed; every element of every target is filled, or it is an error.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol

import numpy as np
import torch

from ckptlib import dtypes
from ckptlib.box import Box, boxes_of_range, find_hole, find_overlap
from ckptlib.digests import digester
from ckptlib.errors import CorruptData, StateMismatch
from ckptlib.keys import SaveId
from ckptlib.layout import ByHand, Layout, PerRank, TensorEntry, ranks_touching
from ckptlib.manifest import Part
from ckptlib.memory import bytes_of, is_bytes

READ_THREADS = 8
"""Requests under way at once: a local disk is busy with 4, an object store wants more."""

RUN_BYTES = 16 * 1024 * 1024
"""The most that one request asks for; times READ_THREADS, it bounds the memory of a load."""

GAP_BYTES = 64 * 1024
"""A hole between two wanted ranges that is cheaper to read than another request."""

DIRECT_FROM_BYTES = 1024 * 1024
"""From this size on, a chunk that fits its target as it is gets read straight into it."""


class Source(Protocol):
    """One step, wherever it lies: in a store, or in memory."""

    save: SaveId
    world_size: int
    layouts: Mapping[str, tuple[int, ...]]
    """By digest: the saved ranks that have it."""
    where: str
    """For people."""

    def layout(self, digest: str) -> Layout:
        """Raises CorruptData, FormatError, ObjectNotFound."""

    def part(self, rank: int) -> Part:
        """A saved rank's, checked against its layout. Raises as `layout` does."""

    def read_into(self, pack: str, offset: int, buffer: memoryview) -> None:
        """Fills `buffer` with bytes of one of a part's packs. From any thread. Raises StoreError."""

    def near(self, ranks: Collection[int]) -> Collection[int] | None:
        """The ranks of this job to which the shares of all these saved ranks are near; None: to all alike."""

    def bring(self, ranks: Collection[int]) -> None:
        """Makes the shares of these saved ranks readable here, before they are asked for. Collective."""


@dataclass(frozen=True, slots=True)
class Want:
    """One tensor to be filled."""

    name: str
    """As the checkpoint calls it."""
    pieces: tuple[tuple[Box, torch.Tensor], ...]
    """Boxes in global coordinates, each with a view of the same shape to be filled."""
    everywhere: bool = False
    """Whether it is a whole plain tensor, which every rank is likely to want."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A contiguous stretch of a chunk, and where it goes."""

    first: int
    """Element of the chunk."""
    shape: tuple[int, ...]
    """Of the stretch, as it lies in the chunk."""
    inside: tuple[slice | EllipsisType, ...]
    """What of that is wanted."""
    target: torch.Tensor
    """Of the wanted shape."""


@dataclass(frozen=True, slots=True)
class _ChunkRead:
    """One chunk to be read, checked and placed."""

    pack: str
    offset: int
    nbytes: int
    digest: str
    what: str
    """The tensor and box, for messages."""
    dtype: torch.dtype
    copies: tuple[_Copy, ...]

    @property
    def address(self) -> int | None:
        """Of the target's memory, when the chunk's bytes are exactly that."""
        if len(self.copies) != 1:
            return None
        target = self.copies[0].target
        fits = target.nbytes == self.nbytes and target.dtype == self.dtype and is_bytes(target)
        return target.data_ptr() if fits and target.device.type == "cpu" else None


class _Run:
    """Chunks that one request reads: neighbours in a pack."""

    def __init__(self, read: _ChunkRead) -> None:
        self.reads = [read]
        self.base = read.address
        """Where the run's bytes go as they are, one after the other; None: they do not."""
        self._largest = read.nbytes

    @property
    def pack(self) -> str:
        return self.reads[0].pack

    @property
    def offset(self) -> int:
        return self.reads[0].offset

    @property
    def nbytes(self) -> int:
        return self.reads[-1].offset + self.reads[-1].nbytes - self.offset

    @property
    def direct(self) -> bool:
        """Whether it is worth reading straight into the targets."""
        return self.base is not None and self.nbytes >= DIRECT_FROM_BYTES

    def take(self, read: _ChunkRead) -> bool:
        """Whether the next chunk in the order of packs joins this request."""
        gap = read.offset - self.offset - self.nbytes
        if read.pack != self.pack or read.offset + read.nbytes - self.offset > RUN_BYTES or not 0 <= gap <= GAP_BYTES:
            return False
        goes_on = gap == 0 and self.base is not None and read.address == self.base + self.nbytes
        if not goes_on and (self.direct or max(self._largest, read.nbytes) >= DIRECT_FROM_BYTES):
            return False
        if not goes_on:
            self.base = None
        self.reads.append(read)
        self._largest = max(self._largest, read.nbytes)
        return True


def own_rank(rank: int, world_size: int) -> int:
    """The saved rank whose values and per-rank tensors a rank takes: its own, or 0 where it is new."""
    return rank if rank < world_size else 0


class Reader:
    """Reads one step for one rank."""

    def __init__(self, source: Source, rank: int) -> None:
        self._source = source
        self._rank = rank
        self._parts: dict[int, Part] = {}
        self._shards: dict[int, dict[str, list[int]]] = {}
        self.layouts: Mapping[str, Layout] = {digest: source.layout(digest) for digest in source.layouts}
        self._ranks = {digest: frozenset(ranks) for digest, ranks in source.layouts.items()}
        self.nbytes_read = 0

    @property
    def own_rank(self) -> int:
        """See the function."""
        return own_rank(self._rank, self._source.world_size)

    def part(self, rank: int) -> Part:
        """A rank's part, read once."""
        if rank not in self._parts:
            part = self._source.part(rank)
            layout = self.layouts[part.table.layout]
            shards: dict[str, list[int]] = {}
            for shard, tensor in enumerate(part.table.tensors):
                shards.setdefault(layout.tensors[tensor].name, []).append(shard)
            self._shards[rank] = shards
            self._parts[rank] = part
        return self._parts[rank]

    def entries(self, name: str) -> dict[str, TensorEntry]:
        """By layout: the tensor of this name."""
        found = ((digest, layout.find(name)) for digest, layout in self.layouts.items())
        return {digest: entry for digest, entry in found if entry is not None}

    def same_bytes(self, first: str, second: str) -> bool:
        """Whether two tensors were saved with the same content, as their digests tell."""
        found = []
        for name in (first, second):
            whole = Box.whole(next(iter(self.entries(name).values())).shape)
            ranks = sorted(self.ranks_for(Want(name, ((whole, torch.empty(0)),))))
            found.append({box: self._digests(*at) for box, at in self._sources(name, ranks).items()})
        return found[0] == found[1]

    def read(self, wants: Sequence[Want], progress: Callable[[int], None]) -> None:
        """Fills every want. `progress` is told of bytes as they arrive.

        Raises CorruptData that names the tensor, StateMismatch for an element that no chunk covers, StoreError.
        """
        with ThreadPoolExecutor(READ_THREADS, "ckptlib-read") as executor:
            ranks = [self.ranks_for(want) for want in wants]
            list(executor.map(self.part, sorted(set().union(*ranks) - self._parts.keys())))
            reads = [read for want, of in zip(wants, ranks, strict=True) for read in self._plan(want, of)]
            runs = _merge(reads)
            verify = digester(self.part(self.own_rank).algorithm)
            try:
                for nbytes in executor.map(lambda run: self._run(run, verify), runs):
                    self.nbytes_read += nbytes
                    progress(nbytes)
            finally:
                executor.shutdown(cancel_futures=True)

    def ranks_for(self, want: Want) -> set[int]:
        """Whose parts may hold what is wanted."""
        found: set[int] = set()
        for digest, entry in self.entries(want.name).items():
            ranks = self._ranks[digest]
            if isinstance(entry.holding, PerRank) or self._source.world_size == 1:
                found |= {self.own_rank} & ranks
                continue
            for box, _ in want.pieces:
                found.update(ranks_touching(entry, box, ranks))
        return found

    def _plan(self, want: Want, ranks: Iterable[int]) -> Iterable[_ChunkRead]:
        sources = self._sources(want.name, sorted(ranks))
        for box, target in want.pieces:
            touching = {b: source for b, source in sources.items() if b.intersect(box) is not None}
            self._check_cover(want.name, box, touching)
            for source_box, (rank, shard) in touching.items():
                yield from self._plan_shard(rank, shard, source_box, box, target)

    def _sources(self, name: str, ranks: Iterable[int]) -> dict[Box, tuple[int, int]]:
        """By box: a rank and the shard of its part. Where two hold the same box, their digests must agree."""
        found: dict[Box, tuple[int, int]] = {}
        for rank in ranks:
            part = self.part(rank)
            saved = self.layouts[part.table.layout].aliases.get(name, name)
            for shard in self._shards[rank].get(saved, []):
                box = part.table.boxes[shard]
                if box in found and self._digests(*found[box]) != self._digests(rank, shard):
                    raise CorruptData(f"{name}{box}: ranks {found[box][0]} and {rank} saved different bytes for it")
                found.setdefault(box, (rank, shard))
        return found

    def _digests(self, rank: int, shard: int) -> tuple[str, ...]:
        part = self.part(rank)
        first = part.table.first_chunks[shard]
        return part.digests[first : first + part.table.num_chunks[shard]]

    def _check_cover(self, name: str, box: Box, sources: Mapping[Box, tuple[int, int]]) -> None:
        if len(sources) == 1 and box.within(next(iter(sources))):
            return  # the most common case by far, and the general one costs 25 us
        hole = find_hole(box, list(sources))
        if hole is not None:
            raise CorruptData(
                f"{name}{hole}: no chunk of step {self._source.save.step} holds these elements; try an earlier step, "
                "or: ckptlib verify"
            )
        by_hand = any(isinstance(entry.holding, ByHand) for entry in self.entries(name).values())
        overlap = find_overlap(box, list(sources)) if by_hand else None
        if overlap is not None:
            raise StateMismatch(
                f"{name}{overlap}: two of the boxes given by hand overlap here, so its value is not known"
            )

    def _plan_shard(self, rank: int, shard: int, box: Box, wanted: Box, target: torch.Tensor) -> Iterable[_ChunkRead]:
        """The chunks of a shard that hold something of `wanted`."""
        part = self.part(rank)
        table = part.table
        entry = self.layouts[table.layout].tensors[table.tensors[shard]]
        itemsize, dtype = dtypes.itemsize(entry.dtype), getattr(torch, entry.dtype)
        element = 0
        for chunk in range(table.first_chunks[shard], table.first_chunks[shard] + table.num_chunks[shard]):
            count = table.nbytes[chunk] // itemsize
            copies = tuple(_copies(box, element, element + count, wanted, target))
            element += count
            if copies:
                yield _ChunkRead(
                    part.packs[table.packs[chunk]].key,
                    table.offsets[chunk],
                    table.nbytes[chunk],
                    part.digests[chunk],
                    f"{entry.name}{box}",
                    dtype,
                    copies,
                )

    def _run(self, run: _Run, verify: Callable[[memoryview], str]) -> int:
        """One request: its chunks are checked, then placed."""
        start = run.offset
        if run.direct:
            buffer = memoryview((ctypes.c_char * run.nbytes).from_address(run.base or 0)).cast("B")
        else:
            start -= start % 64  # so that every chunk keeps the alignment that it has in the pack
            buffer = _buffer(run.offset + run.nbytes - start)
        self._source.read_into(run.pack, start, buffer)
        for read in run.reads:
            data = buffer[read.offset - start : read.offset - start + read.nbytes]
            found = verify(data)
            if found != read.digest:
                raise CorruptData(
                    f"{read.what}: {read.pack} [{read.offset}:+{read.nbytes}] does not match {read.digest} (got "
                    f"{found}); the object was altered after it was written. Try an earlier step than "
                    f"{self._source.save.step}, or: ckptlib verify"
                )
            if not run.direct:
                _place(read, data)
        return len(buffer)


def _copies(box: Box, first: int, last: int, wanted: Box, target: torch.Tensor) -> Iterable[_Copy]:
    """How elements [first, last) of a shard that fills `box` go into `target`, which fills `wanted`."""
    if box == wanted and last - first == box.numel:  # a shard of one chunk, wanted as it is: most small tensors
        yield _Copy(0, box.shape, (...,), target)
        return
    for flat, local in boxes_of_range(box.shape, first, last):
        here = Box(tuple(o + b for o, b in zip(local.offset, box.offset, strict=True)), local.shape)
        common = here.intersect(wanted)
        if common is not None:
            yield _Copy(
                flat - first,
                here.shape,
                common.relative_to(here.offset).slices(),
                target[common.relative_to(wanted.offset).slices()] if wanted.ndim else target,
            )


def _merge(reads: Sequence[_ChunkRead]) -> list[_Run]:
    """Reads in the order of their packs, neighbours together in one request."""
    runs: list[_Run] = []
    for read in sorted(reads, key=lambda r: (r.pack, r.offset)):
        if not (runs and runs[-1].take(read)):
            runs.append(_Run(read))
    return runs


_local = threading.local()


def _buffer(nbytes: int) -> memoryview:
    """This thread's buffer: made once and reused, since fresh memory costs more than the read."""
    held: np.ndarray | None = getattr(_local, "buffer", None)
    if held is None or held.nbytes < nbytes:
        held = _local.buffer = np.empty(max(nbytes, 1 << 20) + 64, dtype=np.uint8)
    skip = -held.ctypes.data % 64
    return held.data[skip : skip + nbytes]


@torch.no_grad()
def _place(read: _ChunkRead, data: memoryview) -> None:
    elements = torch.frombuffer(data, dtype=torch.uint8).view(read.dtype)
    for copy in read.copies:
        count = int(np.prod(copy.shape, dtype=np.int64))
        source = elements[copy.first : copy.first + count].view(copy.shape)[copy.inside]
        if source.dtype == copy.target.dtype and source.is_contiguous() and is_bytes(copy.target):
            # dtypes that torch cannot copy element by element are bytes all the same
            bytes_of(copy.target).copy_(bytes_of(source))
        else:
            copy.target.copy_(source)
