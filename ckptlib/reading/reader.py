"""Reads the parts and packs of a step into memory, whatever layout either side has.

A part's rows say where each shard lies; layouts only tell which parts to open. Every chunk is read whole and checked
against its digest before a byte of it is used. An element of a target that is not filled is an error.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

from ckptlib.catalog.chunks import UNSEEN_BYTES, check_there
from ckptlib.catalog.shards import PartIndex, SavedShard, ShardComparer
from ckptlib.errors import CorruptData, FormatError, UnsupportedState
from ckptlib.format import dtypes, gc_pause
from ckptlib.format.box import Box, Run, common_run, find_hole
from ckptlib.format.digests import digester_of_pieces
from ckptlib.format.layout import Layout, OwnPerRank, TensorEntry, ranks_touching
from ckptlib.format.overlaps import Meeting, meetings
from ckptlib.format.part import Part
from ckptlib.reading.hands import Hands
from ckptlib.reading.requests import ChunkRead, Landing, Request, Target, copies_of, merge
from ckptlib.reading.source import StepSource, own_rank

log = logging.getLogger(__name__)

T = TypeVar("T")
"""Kind of memory that is filled: arrays, or tensors."""


class Place(NamedTuple):
    """A saved shard: the share that it is in, and its position there."""

    share: PartIndex
    shard: int
    """Position in the table of the share's part."""

    @property
    def box(self) -> Box:
        """Its box in its tensor."""
        return self.share.part.table.boxes[self.shard]

    def whole(self) -> SavedShard:
        """Returns the shard with everything that comparing it takes."""
        return self.share.shard(self.shard)


class Touching(NamedTuple):
    """A saved box that meets the wanted one."""

    position: int
    """Its position among the saved boxes."""
    run: Run | None
    """Their intersection, if that is one run."""


class Cover(NamedTuple):
    """How saved boxes make up a wanted one."""

    touching: tuple[Touching, ...]
    hole: Box | None
    """A region that none of them holds, or None."""


Reads = dict[tuple[int, int], ChunkRead]
"""Reads of chunks, by saved rank and chunk."""


@dataclass(frozen=True, slots=True)
class Want(Generic[T]):
    """One tensor to be filled."""

    name: str
    """Name that it is saved under."""
    pieces: tuple[tuple[Box, T], ...]
    """Boxes in global coordinates, each with a view of the same shape to be filled."""
    everywhere: bool = False
    """Whether it is a whole plain tensor, which every rank is likely to want."""
    outer: T | None = None
    """The DTensor that the pieces are of, if any: torch counts writes to that apart."""


class StepReader(ABC, Generic[T]):
    """Reads one step for one rank, into memory of one kind."""

    def __init__(self, source: StepSource, rank: int) -> None:
        self._source = source
        self._rank = rank
        self._shares: dict[int, PartIndex] = {}
        self._contents = ShardComparer(source.read_into)
        self.layouts: Mapping[str, Layout] = {digest: source.layout(digest) for digest in source.layouts}
        self._ranks = {digest: frozenset(ranks) for digest, ranks in source.layouts.items()}
        self._own = frozenset({self.own_rank})
        self._own_layout = next(digest for digest, ranks in self._ranks.items() if self._own <= ranks)
        self.nbytes_read = 0
        self.rounded: dict[str, float] = {}
        """Bound of the error by name, of tensors that are not exactly as they were saved: see `LoadReport.rounded`."""

    @abstractmethod
    def target(self, memory: T) -> Target:
        """Returns the target for this memory."""

    @abstractmethod
    def landing(self, memory: Iterable[T]) -> Landing:
        """Returns the landing for one read into all of this memory."""

    @property
    def own_rank(self) -> int:
        """The saved rank whose values this rank takes; see the function `own_rank`."""
        return own_rank(self._rank, self._source.world_size)

    @property
    def step(self) -> int:
        return self._source.save.step

    def part(self, rank: int) -> Part:
        """Returns a rank's part, read once."""
        return self._share(rank).part

    def first_rank(self, layout: str) -> int:
        """Returns the first of the saved ranks that have a layout."""
        return min(self._ranks[layout])

    def _share(self, rank: int) -> PartIndex:
        found = self._shares.get(rank)
        if found is None:
            part = self._source.part(rank)
            if part.table.layout not in self.layouts:
                raise FormatError(
                    f"{self._source.save}: the part of rank {rank} is of the layout {part.table.layout}, expected one "
                    f"that its manifest names: {', '.join(self.layouts)}"
                )
            found = self._shares[rank] = PartIndex(part, self.layouts[part.table.layout])
        return found

    def entries(self, name: str) -> dict[str, TensorEntry]:
        """Returns the tensor that is saved under this name, by layout; only this rank's if each rank has its own."""
        own = self.layouts[self._own_layout].find(name)
        if own is not None and isinstance(own.holding, OwnPerRank):
            return {self._own_layout: own}
        found = ((digest, layout.find(name)) for digest, layout in self.layouts.items())
        return {
            digest: entry for digest, entry in found if entry is not None and not isinstance(entry.holding, OwnPerRank)
        }

    def same_bytes(self, first: str, second: str, boxes: Sequence[Box] | None = None) -> bool:
        """Returns whether two tensors were saved with the same content, at least in `boxes` if any are given."""
        kinds = [next(iter(self.entries(name).values())) for name in (first, second)]
        if (kinds[0].dtype, kinds[0].shape) != (kinds[1].dtype, kinds[1].shape):
            return False
        return all(self._same_in(box, first, second) for box in (boxes or [Box.whole(kinds[0].shape)]))

    def _same_in(self, box: Box, first: str, second: str) -> bool:
        sides = []
        for name in (first, second):
            places = _places(name, self._shares_of(self.ranks_holding(name, [box])))
            sides.append({b: place for b, place in self._sources(name, places, [box]).items() if b.intersect(box)})
        alike = sides[0].keys() == sides[1].keys()
        if not alike and any(find_hole(box, [*side]) for side in sides):
            return False
        pairs = ((b, b) for b in sides[0]) if alike else ((a, b) for a in sides[0] for b in sides[1])
        return all(
            self._same(sides[0][a], sides[1][b], common)
            for a, b in pairs
            if (in_both := a.intersect(b)) is not None and (common := in_both.intersect(box)) is not None
        )

    def read(self, wants: Sequence[Want[T]], progress: Callable[[int], None]) -> None:
        """Fills every want. `progress` is told of bytes as they arrive.

        Raises CorruptData that names the tensor, also if no chunk covers an element or several ranks saved different
        values for it; StoreError.
        """
        with Hands(self._source.limits.threads) as hands:
            ranks = [self.ranks_for(want) for want in wants]
            list(hands.map(self._share, sorted(frozenset().union(*ranks) - self._shares.keys())))
            with gc_pause.kept():
                requests = self._plan(wants, ranks)
            digest = digester_of_pieces(self.part(self.own_rank).algorithm)
            landing = self.landing(memory for want in wants for _, memory in want.pieces)
            try:
                for nbytes in hands.map(lambda request: self._run(request, digest, landing), requests):
                    self.nbytes_read += nbytes
                    progress(nbytes)
            finally:
                hands.stop()
                landing.close()

    def check_there(self, name: str, box: Box, itemsize: int) -> None:
        """Checks that a large box of a tensor is where parts say that it is, before memory is allocated for it.

        Raises CorruptData if no part has a region, and what a read raises if a pack ends early.
        """
        if box.numel * itemsize <= UNSEEN_BYTES:
            return
        places = _places(name, self._shares_of(self.ranks_holding(name, [box])))
        boxes = tuple([place.box for place in places])
        cover = _cover(box, boxes)
        self._check_cover(name, cover.hole)
        ends: dict[str, int] = {}
        for touching in cover.touching:
            share, shard = places[touching.position]
            part, table = share.part, share.part.table
            for chunk in table.chunks(shard):
                pack = part.packs[table.packs[chunk]].key
                ends[pack] = max(ends.get(pack, 0), table.offsets[chunk] + part.stored[chunk])
        for pack, end in ends.items():
            self._source.read_into(pack, end - 1, memoryview(bytearray(1)))

    def ranks_for(self, want: Want[T]) -> frozenset[int]:
        """Returns the ranks whose parts may hold the wanted box."""
        if self._source.world_size == 1:
            return self._own
        return self.ranks_holding(want.name, [box for box, _ in want.pieces])

    def ranks_holding(self, name: str, boxes: Iterable[Box]) -> frozenset[int]:
        """Returns the ranks whose parts may hold anything of these boxes of a tensor."""
        if self._source.world_size == 1:
            return self._own
        found: set[int] = set()
        boxes = list(boxes)
        for digest, entry in self.entries(name).items():
            ranks = self._ranks[digest]
            if isinstance(entry.holding, OwnPerRank):
                found |= self._own & ranks
                continue
            for box in boxes:
                found.update(ranks_touching(entry, box, ranks))
        return frozenset(found)

    def chunk_begins(self, name: str) -> list[int]:
        """Returns flat positions in a tensor, ascending, where saved chunks begin, so that a range between two of them
        reads no chunk for only a part of it. Omits shards that are not one run of the tensor."""
        entry = next(iter(self.entries(name).values()))
        whole, itemsize = Box.whole(entry.shape), dtypes.itemsize(entry.dtype)
        places = _places(name, self._shares_of(self.ranks_holding(name, [whole])))
        found = set()
        for i, run in _cover(whole, tuple([place.box for place in places])).touching:
            if run is not None:
                table, element = places[i].share.part.table, run.at
                for chunk in table.chunks(places[i].shard):
                    found.add(element)
                    element += table.nbytes[chunk] // itemsize
        return sorted(found)

    def _plan(self, wants: Sequence[Want[T]], ranks: Sequence[frozenset[int]]) -> list[Request]:
        """Returns the requests that fill all wants. `ranks`: for each want, the ranks whose parts may hold it."""
        reads: Reads = {}
        before: frozenset[int] | None = None
        for want, of in zip(wants, ranks, strict=True):
            if of != before:  # mostly, everything that a rank wants lies in the parts of the same ranks
                before, shares = of, self._shares_of(of)
            self._plan_want(want, shares, reads)
        for (_, chunk), read in reads.items():
            coding = read.coding
            if coding is not None and coding.loss is not None:
                for name in read.share.names_in(chunk):
                    self.rounded[name] = max(self.rounded.get(name, 0.0), coding.loss.relative)
        return merge(reads.values(), self._source.limits)

    def _plan_want(self, want: Want[T], shares: Sequence[PartIndex], reads: Reads) -> None:
        """Adds the reads that fill a want. `shares`: the shares that may hold it."""
        places = _places(want.name, shares)
        boxes = tuple([share.boxes[shard] for share, shard in places])
        if len(boxes) > 1 and _meetings(want.name, boxes):
            sources = self._sources(want.name, places, [box for box, _ in want.pieces])
            boxes, places = tuple(sources), [*sources.values()]
        for box, memory in want.pieces:
            to = self.target(memory)
            if boxes == (box,) and to.numel:  # saved and wanted alike, as most tensors are
                _plan_shards(places, [Touching(0, Run(0, 0, to.numel))], box, to, reads)
                continue
            cover = _cover(box, boxes)
            self._check_cover(want.name, cover.hole)
            _plan_shards(places, cover.touching, box, to, reads)

    def _shares_of(self, ranks: Collection[int]) -> list[PartIndex]:
        """Returns the shares of these ranks, in ascending order."""
        return [*map(self._share, sorted(ranks))]

    def _sources(self, name: str, places: Sequence[Place], wanted: Sequence[Box]) -> dict[Box, Place]:
        """Returns the first shard that fills each box. If two shards overlap, the wanted part must be equal in both."""
        boxes = tuple([place.box for place in places])
        for i, j, region in _meetings(name, boxes):
            for common in filter(None, map(region.intersect, wanted)):
                if not self._same(places[i], places[j], common):
                    ranks = f"ranks {places[i].share.part.rank} and {places[j].share.part.rank}"
                    raise CorruptData(f"{name}{common}: {ranks} saved different bytes for it")
        found: dict[Box, Place] = {}
        for box, place in zip(boxes, places, strict=True):
            found.setdefault(box, place)
        return found

    def _same(self, first: Place, second: Place, region: Box) -> bool:
        return self._contents.same(first.whole(), second.whole(), region)

    def _check_cover(self, name: str, hole: Box | None) -> None:
        if hole is not None:
            step = self._source.save.step
            raise CorruptData(
                f"{name}{hole}: no chunk of step {step} holds these elements; try an earlier step, or: ckptlib verify "
                f"URL {step}"
            )

    def _run(self, request: Request, digest: Callable[[Iterable[memoryview]], str], landing: Landing) -> int:
        """Carries out one request; returns the bytes read. Reads a damaged chunk again if that may help."""
        source = self._source
        check_there(source.read_into, request.pack, request.offset, request.nbytes)
        for left in range(source.limits.reads - 1, -1, -1):
            try:
                return request.carry_out(source.read_into, digest, source.save.step, landing)
            except CorruptData as error:
                if not left:
                    raise
                log.warning("%s; it is read once more, since the network may have altered it", error)
        raise AssertionError("a source is read at least once")


def _places(name: str, shares: Iterable[PartIndex]) -> list[Place]:
    """Returns the shards of a tensor."""
    found = list[Place]()
    columns, shards = None, None
    for share in shares:
        if shards is None or share.columns is not columns:  # otherwise it is cut like the one before it
            columns, shards = share.columns, share.shards(name)
        for shard in shards:
            found.append(Place(share, shard))
    return found


def _plan_shards(places: Sequence[Place], touching: Iterable[Touching], wanted: Box, to: Target, reads: Reads) -> None:
    """Adds the chunks of those shards that meet `wanted`."""
    columns, shard, whole, as_is = None, -1, False, False
    skipped, dtype, chunk = 0, "", 0
    for i, run in touching:
        share, at = places[i]
        if at != shard or share.columns is not columns:  # otherwise it is cut like the one before it
            shard, columns = at, share.columns
            skipped, dtype, chunk = columns.skipped[at], columns.dtypes[at], share.first_chunks[at]
            whole, as_is = to.is_row_major and share.num_chunks[at] <= 1, to.takes_bytes(dtype)
        if run is not None and whole:  # nearly all
            read = reads.get((share.rank, chunk)) or _read_of(reads, share, chunk)
            (read.to_host if as_is else read.runs).append((to, run, skipped, dtype))
        else:
            _plan_shard(share, at, run, wanted, to, reads)


def _plan_shard(share: PartIndex, shard: int, run: Run | None, wanted: Box, to: Target, reads: Reads) -> None:
    """Adds the chunks of one shard that meet `wanted`. `run`: its intersection with `wanted`, if it is one run."""
    several, columns = share.num_chunks[shard] > 1, share.columns
    dtype, skipped = columns.dtypes[shard], columns.skipped[shard]
    element, itemsize, table = 0, dtypes.itemsize(dtype), share.part.table
    for chunk in table.chunks(shard):
        stop = element + (table.nbytes[chunk] if several else columns.sizes[shard]) // itemsize
        if run is None or not to.is_row_major:
            for copy in copies_of(table.boxes[shard], element, stop, wanted, to.memory, skipped, dtype):
                _read_of(reads, share, chunk).boxes.append(copy)
        else:
            first, last = max(run.first, element), min(run.first + run.numel, stop)
            if first < last:
                read = _read_of(reads, share, chunk)
                here = Run(first - element, run.at + first - run.first, last - first)
                (read.to_host if to.takes_bytes(dtype) else read.runs).append((to, here, skipped, dtype))
        element = stop


def _read_of(reads: Reads, share: PartIndex, chunk: int) -> ChunkRead:
    key = share.rank, chunk
    found = reads.get(key)
    if found is None:
        found = reads[key] = ChunkRead(share, chunk)
    return found


def _meetings(name: str, boxes: tuple[Box, ...]) -> tuple[Meeting, ...]:
    try:
        return _meetings_of(boxes)
    except UnsupportedState as error:
        raise FormatError(f"{name}: {error}") from error


@lru_cache(maxsize=256)  # layers are alike
def _meetings_of(boxes: tuple[Box, ...]) -> tuple[Meeting, ...]:
    return tuple(meetings(boxes))


@lru_cache(maxsize=256)
def _cover(wanted: Box, boxes: tuple[Box, ...]) -> Cover:
    touching = (Touching(i, common_run(b, wanted)) for i, b in enumerate(boxes) if b.intersect(wanted) is not None)
    return Cover(tuple(touching), find_hole(wanted, boxes))
