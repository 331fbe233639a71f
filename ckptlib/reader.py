"""From the parts and packs of a committed step into tensors, whatever layout either side has.

A part's rows are the truth of what lies where; layouts only tell which parts to open. Every chunk is read whole and
checked against its digest before a byte of it is believed; every element of every target is filled, or it is an error.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from types import EllipsisType
from typing import Protocol

import numpy as np
import torch
from typing_extensions import override

from ckptlib import garbage
from ckptlib.box import Box, Run, boxes_of_range, common_run, find_hole, find_overlap
from ckptlib.contents import Contents, Share
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


_Move = tuple[int, int, int]
"""(first byte in the chunk, bytes, address): what goes into memory of the host as it is."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """A contiguous stretch of a chunk, and where it goes."""

    first: int
    """Byte of the chunk."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of the stretch, as it lies in the chunk."""
    inside: tuple[slice | EllipsisType, ...]
    """What of that is wanted."""
    target: torch.Tensor
    """Of the wanted shape."""


class _ChunkRead:
    """One chunk to be read, checked and placed."""

    __slots__ = ("chunk", "copies", "moves", "nbytes", "offset", "pack", "share")

    def __init__(self, share: Share, chunk: int) -> None:
        table = share.part.table
        self.share, self.chunk = share, chunk
        self.pack = share.part.packs[table.packs[chunk]].key
        self.offset, self.nbytes = table.offsets[chunk], table.nbytes[chunk]
        self.moves: list[_Move] = []
        self.copies: list[_Copy] = []

    @property
    def digest(self) -> str:
        return self.share.part.digests[self.chunk]

    @property
    def address(self) -> int | None:
        """Of the target's memory, when the chunk's bytes are exactly that."""
        if self.copies or len(self.moves) != 1 or self.moves[0][1] != self.nbytes:
            return None
        return self.moves[0][2]

    @override
    def __str__(self) -> str:
        """The tensors that lie in it, for messages."""
        return self.share.part.table.describe(self.chunk, self.share.layout)


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
        self._shares: dict[int, Share] = {}
        self._contents = Contents(source.read_into)
        self.layouts: Mapping[str, Layout] = {digest: source.layout(digest) for digest in source.layouts}
        self._ranks = {digest: frozenset(ranks) for digest, ranks in source.layouts.items()}
        self._own = frozenset({self.own_rank})
        self.nbytes_read = 0

    @property
    def own_rank(self) -> int:
        """See the function."""
        return own_rank(self._rank, self._source.world_size)

    def part(self, rank: int) -> Part:
        """A rank's part, read once."""
        return self._share(rank).part

    def _share(self, rank: int) -> Share:
        found = self._shares.get(rank)
        if found is None:
            part = self._source.part(rank)
            found = self._shares[rank] = Share(part, self.layouts[part.table.layout])
        return found

    def entries(self, name: str) -> dict[str, TensorEntry]:
        """By layout: the tensor of this name."""
        found = ((digest, layout.find(name)) for digest, layout in self.layouts.items())
        return {digest: entry for digest, entry in found if entry is not None}

    def same_bytes(self, first: str, second: str) -> bool:
        """Whether two tensors were saved with the same content."""
        found = []
        for name in (first, second):
            whole = Box.whole(next(iter(self.entries(name).values())).shape)
            ranks = sorted(self.ranks_for(Want(name, ((whole, torch.empty(0)),))))
            found.append(self._sources(name, ranks))
        return found[0].keys() == found[1].keys() and all(self._same(at, found[1][box]) for box, at in found[0].items())

    def read(self, wants: Sequence[Want], progress: Callable[[int], None]) -> None:
        """Fills every want. `progress` is told of bytes as they arrive.

        Raises CorruptData that names the tensor, StateMismatch for an element that no chunk covers, StoreError.
        """
        with ThreadPoolExecutor(READ_THREADS, "ckptlib-read") as executor:
            ranks = [self.ranks_for(want) for want in wants]
            list(executor.map(self._share, sorted(frozenset().union(*ranks) - self._shares.keys())))
            with garbage.kept():
                runs = self._plan(wants, ranks)
            verify = digester(self.part(self.own_rank).algorithm)
            try:
                for nbytes in executor.map(lambda run: self._run(run, verify), runs):
                    self.nbytes_read += nbytes
                    progress(nbytes)
            finally:
                executor.shutdown(cancel_futures=True)

    def ranks_for(self, want: Want) -> frozenset[int]:
        """Whose parts may hold what is wanted."""
        if self._source.world_size == 1:
            return self._own
        found: set[int] = set()
        for digest, entry in self.entries(want.name).items():
            ranks = self._ranks[digest]
            if isinstance(entry.holding, PerRank):
                found |= self._own & ranks
                continue
            for box, _ in want.pieces:
                found.update(ranks_touching(entry, box, ranks))
        return frozenset(found)

    def _plan(self, wants: Sequence[Want], ranks: Sequence[frozenset[int]]) -> list[_Run]:
        """The requests that fill all wants. `ranks`: of each want, whose parts may hold it."""
        reads: dict[tuple[int, int], _ChunkRead] = {}
        for want, of in zip(wants, ranks, strict=True):
            if len(of) == len(want.pieces) == 1:
                (rank,), ((box, target),) = of, want.pieces
                share = self._share(rank)
                shards = share.shards(want.name)
                if len(shards) == 1 and share.part.table.boxes[shards[0]] == box:
                    self._plan_shard(share, shards[0], Run(0, 0, box.numel), box, _Target(target), reads)
                    continue  # saved and wanted alike: most tensors by far, and the general way costs twice as much
            self._plan_want(want, of, reads)
        return _merge(reads.values())

    def _plan_want(self, want: Want, ranks: Collection[int], reads: dict[tuple[int, int], _ChunkRead]) -> None:
        """Adds to `reads`, by saved rank and chunk, what fills a want."""
        sources = self._sources(want.name, sorted(ranks))
        boxes, shards = tuple(sources), list(sources.values())
        for box, target in want.pieces:
            touching, hole = _cover(box, boxes)
            self._check_cover(want.name, box, boxes, hole)
            to = _Target(target)
            for i, run in touching:
                rank, shard = shards[i]
                self._plan_shard(self._shares[rank], shard, run, box, to, reads)

    def _sources(self, name: str, ranks: Iterable[int]) -> dict[Box, tuple[int, int]]:
        """By box: a rank and the shard of its part. Where two hold the same box, their bytes must agree."""
        found: dict[Box, tuple[int, int]] = {}
        for rank in ranks:
            share = self._share(rank)
            for shard in share.shards(name):
                box = share.part.table.boxes[shard]
                first = found.setdefault(box, (rank, shard))
                if first != (rank, shard) and not self._same(first, (rank, shard)):
                    raise CorruptData(f"{name}{box}: ranks {first[0]} and {rank} saved different bytes for it")
        return found

    def _same(self, first: tuple[int, int], second: tuple[int, int]) -> bool:
        return self._contents.same(self._share(first[0]).shard(first[1]), self._share(second[0]).shard(second[1]))

    def _check_cover(self, name: str, box: Box, sources: Sequence[Box], hole: Box | None) -> None:
        if hole is not None:
            raise CorruptData(
                f"{name}{hole}: no chunk of step {self._source.save.step} holds these elements; try an earlier step, "
                "or: ckptlib verify"
            )
        by_hand = any(isinstance(entry.holding, ByHand) for entry in self.entries(name).values())
        overlap = find_overlap(box, sources) if by_hand else None
        if overlap is not None:
            raise StateMismatch(
                f"{name}{overlap}: two of the boxes given by hand overlap here, so its value is not known"
            )

    def _plan_shard(
        self,
        share: Share,
        shard: int,
        run: Run | None,
        wanted: Box,
        to: _Target,
        reads: dict[tuple[int, int], _ChunkRead],
    ) -> None:
        """Adds the chunks of a shard that hold something of `wanted`. `run`: what they have in common, if it is one."""
        table, nbytes = share.part.table, share.sizes[shard]
        dtype: torch.dtype = getattr(torch, share.layout.tensors[table.tensors[shard]].dtype)
        itemsize, chunks, element = dtype.itemsize, table.chunks(shard), 0
        for chunk in chunks:
            skipped = share.begins[shard] - table.offsets[chunk] if len(chunks) == 1 else 0
            stop = element + (nbytes if len(chunks) == 1 else table.nbytes[chunk]) // itemsize
            if run is None or not to.is_row_major:
                copies = _copies(table.boxes[shard], element, stop, wanted, to.tensor, skipped, dtype)
                for copy in copies:
                    _read_of(reads, share, chunk).copies.append(copy)
            else:
                first, last = max(run.first, element), min(run.first + run.numel, stop)
                if first < last:
                    at, skipped = run.at + first - run.first, skipped + (first - element) * itemsize
                    to.take(_read_of(reads, share, chunk), skipped, at, last - first, dtype)
            element = stop

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
                    f"{read}: {read.pack} [{read.offset}:+{read.nbytes}] does not match {read.digest} (got "
                    f"{found}); the object was altered after it was written. Try an earlier step than "
                    f"{self._source.save.step}, or: ckptlib verify"
                )
            if not run.direct:
                _place(read, data)
        return len(buffer)


def _read_of(reads: dict[tuple[int, int], _ChunkRead], share: Share, chunk: int) -> _ChunkRead:
    found = reads.get((share.part.rank, chunk))
    if found is None:
        found = reads[share.part.rank, chunk] = _ChunkRead(share, chunk)
    return found


class _Target:
    """A tensor to be filled."""

    __slots__ = ("_flat", "address", "is_row_major", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._flat: torch.Tensor | None = None
        self.is_row_major = tensor.is_contiguous()
        self.address = tensor.data_ptr() if tensor.device.type == "cpu" and is_bytes(tensor) else None
        """Of its memory, when that is its value, and the host's."""

    def take(self, read: _ChunkRead, skipped: int, at: int, numel: int, dtype: torch.dtype) -> None:
        """Its elements from `at` on, row-major, are what lies behind `skipped` bytes of a chunk."""
        if self.address is not None and self.tensor.dtype == dtype:
            read.moves.append((skipped, numel * dtype.itemsize, self.address + at * dtype.itemsize))
            return
        if self._flat is None:
            self._flat = self.tensor.view(-1)
        read.copies.append(_Copy(skipped, dtype, (numel,), (...,), self._flat[at : at + numel]))


@lru_cache(maxsize=256)  # layers are alike
def _cover(wanted: Box, boxes: tuple[Box, ...]) -> tuple[tuple[tuple[int, Run | None], ...], Box | None]:
    """Positions of the boxes that hold something of what is wanted, each with what they have in common, where that is
    one run; and what none of them holds."""
    touching = ((i, common_run(b, wanted)) for i, b in enumerate(boxes) if b.intersect(wanted) is not None)
    return tuple(touching), find_hole(wanted, boxes)


def _copies(
    box: Box,
    first: int,
    last: int,
    wanted: Box,
    target: torch.Tensor,
    skipped: int,
    dtype: torch.dtype,
) -> Iterable[_Copy]:
    """How elements [first, last) of a shard that fills `box` go into `target`, which fills `wanted`.

    `skipped`: bytes of the chunk that lie before them.
    """
    for flat, local in boxes_of_range(box.shape, first, last):
        here = Box(tuple(o + b for o, b in zip(local.offset, box.offset, strict=True)), local.shape)
        common = here.intersect(wanted)
        if common is not None:
            yield _Copy(
                skipped + (flat - first) * dtype.itemsize,
                dtype,
                here.shape,
                common.relative_to(here.offset).slices(),
                target[common.relative_to(wanted.offset).slices()] if wanted.ndim else target,
            )


def _merge(reads: Iterable[_ChunkRead]) -> list[_Run]:
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


_move: Callable[[int, int, int], int] = ctypes.PyDLL(None).memmove
"""Keeps the GIL, unlike ctypes.memmove: threads that gave it up for every small tensor would wait for one another."""
_move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]  # type: ignore[attr-defined]


@torch.no_grad()
def _place(read: _ChunkRead, data: memoryview) -> None:
    base = ctypes.addressof(ctypes.c_char.from_buffer(data))
    for first, nbytes, address in read.moves:
        move = _move if nbytes < DIRECT_FROM_BYTES else ctypes.memmove
        move(address, base + first, nbytes)
    for copy in read.copies:
        nbytes = copy.dtype.itemsize * math.prod(copy.shape)
        stretch = torch.frombuffer(data[copy.first : copy.first + nbytes], dtype=torch.uint8)
        source = stretch.view(copy.dtype).view(copy.shape)[copy.inside]
        if source.dtype == copy.target.dtype and source.is_contiguous() and is_bytes(copy.target):
            # dtypes that torch cannot copy element by element are bytes all the same
            bytes_of(copy.target).copy_(bytes_of(source))
        else:
            copy.target.copy_(source)
