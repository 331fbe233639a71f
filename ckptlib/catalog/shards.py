"""Compares saved shards where they overlap: by digests if these decide, else by the bytes.

Small shards share chunks, whose digests say nothing about a single shard; and no digest says anything about a region of
a shard. No torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ckptlib.catalog.chunks import ReadInto, read_chunk
from ckptlib.catalog.completeness import Doubt
from ckptlib.errors import CorruptData
from ckptlib.format import dtypes
from ckptlib.format.box import Box, boxes_of_range
from ckptlib.format.digests import digester
from ckptlib.format.layout import Layout
from ckptlib.format.part import Part

_Key = tuple[str, int, int, str]
"""Pack, offset, bytes in it and digest of a chunk."""

BYTES_KEPT = 64 * 1024 * 1024
"""Bytes of chunks that are kept. Shards are compared in about the order in which they lie, those that overlap with many
others very often."""

REGION_BYTES = 16 * 1024 * 1024
"""How many bytes of two shards are compared at once."""


@dataclass(frozen=True, slots=True)
class SavedShard:
    """One shard of a part."""

    part: Part
    layout: Layout
    """The layout of the part."""
    shard: int
    """Position in the part's table."""
    skipped: int
    """Bytes of its first chunk that lie before it."""
    nbytes: int

    @property
    def digests(self) -> tuple[str, ...]:
        """The digests of its chunks."""
        chunks = self.part.table.chunks(self.shard)
        return self.part.digests[chunks.start : chunks.stop]

    @property
    def cuts(self) -> tuple[int, ...]:
        """The sizes of its chunks, in bytes. If two shards are cut alike, their digests are of the same elements."""
        chunks = self.part.table.chunks(self.shard)
        return self.part.table.nbytes[chunks.start : chunks.stop]

    @property
    def box(self) -> Box:
        """The shard's box in its tensor."""
        return self.part.table.boxes[self.shard]

    @property
    def itemsize(self) -> int:
        return dtypes.itemsize(self.layout.tensors[self.part.table.tensors[self.shard]].dtype)

    @property
    def is_shared(self) -> bool:
        return self.part.table.is_shared(self.shard)


class PartIndex:
    """A part with its layout, indexed by tensor and box."""

    def __init__(self, part: Part, layout: Layout) -> None:
        table = part.table
        self.part, self.layout = part, layout
        self.rank, self.boxes, self.num_chunks = part.rank, table.boxes, table.num_chunks
        self.first_chunks = table.first_chunks
        self.columns = table.columns(layout)
        """The same object for parts that are cut alike."""
        self._at: dict[str, dict[Box, list[int]]] = {}

    def shards(self, name: str) -> Sequence[int]:
        """Returns the positions of a tensor's shards in the part's table. `name`: as it is saved."""
        tensor = self.layout.index.get(name)
        return () if tensor is None else self.columns.of_tensor.get(tensor, ())

    def shards_at(self, name: str, box: Box) -> Sequence[int]:
        """Returns the positions of the shards that fill this box of a tensor; at least one must."""
        if name not in self._at:
            at = self._at[name] = {}
            for shard in self.shards(name):
                at.setdefault(self.part.table.boxes[shard], []).append(shard)
        return self._at[name][box]

    def names_in(self, chunk: int) -> list[str]:
        """Returns the names of the tensors that lie in a chunk."""
        table = self.part.table
        return [self.layout.tensors[table.tensors[shard]].name for shard in table.shards_in(chunk)]

    def shard(self, shard: int) -> SavedShard:
        return SavedShard(self.part, self.layout, shard, self.columns.skipped[shard], self.columns.sizes[shard])


class ShardComparer:
    """Compares shards; owned by one thread."""

    def __init__(self, read: ReadInto) -> None:
        self._read = read
        self._chunks: OrderedDict[_Key, bytes] = OrderedDict()
        """The chunks that are kept, the most recently used last."""
        self._nbytes = 0
        """The bytes of these chunks."""
        self._altered: dict[_Key, str] = {}
        """The error messages of chunks that do not match their digests."""

    def settles(self, doubt: Doubt, share: Callable[[int], PartIndex]) -> bool:
        """Whether the shards of a doubt are equal in its region. `share`: returns a rank's part. Raises as `same`
        does."""
        first, second = map(share, doubt.ranks)
        one = first.shards_at(doubt.name, doubt.boxes[0])[0]
        other = second.shards_at(doubt.name, doubt.boxes[1])[-1]  # both shards may be in one part
        return self.same(first.shard(one), second.shard(other), doubt.region)

    def same(self, first: SavedShard, second: SavedShard, region: Box) -> bool:
        """Whether two shards, of tensors of one dtype, hold the same bytes in a region that lies in the boxes of both.

        Raises CorruptData for a chunk that does not match its digest; StoreError if one had to be read.
        """
        if first.box == second.box:
            if first.digests == second.digests and first.skipped == second.skipped:
                return True
            alike = first.cuts == second.cuts and first.part.algorithm == second.part.algorithm
            if alike and region == first.box and not (first.is_shared or second.is_shared):
                return False
        pieces = region.split(REGION_BYTES // first.itemsize)
        return all(np.array_equal(self._bytes(first, piece), self._bytes(second, piece)) for piece in pieces)

    def _bytes(self, saved: SavedShard, region: Box) -> np.ndarray:
        """Returns the elements in a region of a shard, each a row of bytes; reads the chunks in which they lie."""
        box, itemsize, table = saved.box, saved.itemsize, saved.part.table
        wanted = region.relative_to(box.offset)
        found = np.empty((*region.shape, itemsize), np.uint8)
        begin, end = wanted.flat_range(box.shape)
        chunks = table.chunks(saved.shard)
        stop = 0
        for chunk in chunks:
            start, stop = stop, stop + (saved.nbytes if len(chunks) == 1 else table.nbytes[chunk]) // itemsize
            low, high = max(start, begin), min(stop, end)
            if low >= high:
                continue
            data = np.frombuffer(self._chunk(saved.part, chunk, saved.layout), np.uint8)
            skipped = saved.skipped - start * itemsize
            for flat, local in boxes_of_range(box.shape, low, high):
                common = local.intersect(wanted)
                if common is not None:
                    first = flat * itemsize + skipped
                    stretch = data[first : first + local.numel * itemsize].reshape(*local.shape, itemsize)
                    found[common.relative_to(wanted.offset).slices()] = stretch[
                        common.relative_to(local.offset).slices()
                    ]
        return found

    def _chunk(self, part: Part, chunk: int, layout: Layout) -> bytes:
        table = part.table
        pack, offset, nbytes = part.packs[table.packs[chunk]].key, table.offsets[chunk], part.stored[chunk]
        key = pack, offset, nbytes, part.digests[chunk]
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return self._chunks[key]
        if key not in self._altered:
            data = read_chunk(self._read, part, chunk)
            if digester(part.algorithm)(data) == part.digests[chunk]:
                return self._keep(key, bytes(data))
            self._altered[key] = (
                f"{table.describe(chunk, layout)}: {pack} [{offset}:+{nbytes}] does not match {part.digests[chunk]}; "
                "the object was altered after it was written"
            )
        raise CorruptData(self._altered[key])

    def _keep(self, key: _Key, data: bytes) -> bytes:
        self._chunks[key] = data
        self._nbytes += len(data)
        while self._nbytes > BYTES_KEPT and len(self._chunks) > 1:
            self._nbytes -= len(self._chunks.popitem(last=False)[1])
        return data
