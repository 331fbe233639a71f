"""Whether two saved shards hold the same bytes: by their digests where these tell, else by the bytes. No torch.

Small shards share chunks, whose digests say nothing of one of them alone.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptlib.digests import digester
from ckptlib.errors import CorruptData
from ckptlib.layout import Layout
from ckptlib.part import Part

ReadInto = Callable[[str, int, memoryview], None]
"""Fills a buffer with bytes of a pack, from an offset on."""

CHUNKS_KEPT = 16
"""Shards are asked about in about the order in which they lie; a shared chunk has 64 KiB."""


@dataclass(frozen=True, slots=True)
class SavedShard:
    """One shard of a part."""

    part: Part
    layout: Layout
    """The part's."""
    shard: int
    """Position in the part's table."""
    skipped: int
    """Bytes of its first chunk that lie before it."""
    nbytes: int

    @property
    def digests(self) -> tuple[str, ...]:
        """Of its chunks."""
        chunks = self.part.table.chunks(self.shard)
        return self.part.digests[chunks.start : chunks.stop]

    @property
    def is_shared(self) -> bool:
        return self.part.table.is_shared(self.shard)


class Share:
    """A part, with what is asked of it for each tensor looked up once."""

    def __init__(self, part: Part, layout: Layout) -> None:
        table = part.table
        self.part, self.layout = part, layout
        self.sizes = table.sizes(layout)
        """Per shard: its bytes."""
        chunk_begins = map(table.offsets.__getitem__, table.first_chunks)
        self.skipped = [*map(operator.sub, table.begins(self.sizes), chunk_begins)]
        """Per shard: bytes of its first chunk that lie before it."""
        alone = zip(range(len(table.tensors)), strict=True)
        self._shards: Mapping[int, Sequence[int]] = dict(zip(table.tensors, alone, strict=True))
        if len(self._shards) < len(table.tensors):  # a tensor has several
            shards: dict[int, list[int]] = {}
            for shard, tensor in enumerate(table.tensors):
                shards.setdefault(tensor, []).append(shard)
            self._shards = shards

    def shards(self, name: str) -> Sequence[int]:
        """Of a tensor, by any of its names: positions in the part's table."""
        tensor = self.layout.index.get(self.layout.aliases.get(name, name))
        return () if tensor is None else self._shards.get(tensor, ())

    def shard(self, shard: int) -> SavedShard:
        return SavedShard(self.part, self.layout, shard, self.skipped[shard], self.sizes[shard])


class Contents:
    """Compares shards; owned by one thread."""

    def __init__(self, read: ReadInto) -> None:
        self._read = read
        self._chunks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def same(self, first: SavedShard, second: SavedShard) -> bool:
        """Whether two shards of equal boxes hold the same bytes.

        Raises CorruptData for a chunk that does not match its digest, StoreError when one had to be read.
        """
        if first.digests == second.digests and first.skipped == second.skipped:
            return True
        if not first.is_shared and not second.is_shared:
            return False
        return self._bytes(first) == self._bytes(second)

    def _bytes(self, saved: SavedShard) -> bytes:
        chunks = saved.part.table.chunks(saved.shard)
        data = b"".join(self._chunk(saved.part, chunk, saved.layout) for chunk in chunks)
        return data[saved.skipped : saved.skipped + saved.nbytes]

    def _chunk(self, part: Part, chunk: int, layout: Layout) -> bytes:
        table = part.table
        key, offset, nbytes = part.packs[table.packs[chunk]].key, table.offsets[chunk], table.nbytes[chunk]
        found = self._chunks.get((key, offset))
        if found is None:
            buffer = bytearray(nbytes)
            self._read(key, offset, memoryview(buffer))
            found = bytes(buffer)
            if digester(part.algorithm)(found) != part.digests[chunk]:
                raise CorruptData(
                    f"{table.describe(chunk, layout)}: {key} [{offset}:+{nbytes}] does not match "
                    f"{part.digests[chunk]}; the object was altered after it was written"
                )
            self._chunks[key, offset] = found
            if len(self._chunks) > CHUNKS_KEPT:
                self._chunks.popitem(last=False)
        return found
