"""How the body of a slot is cut into packs, and the safetensors header of each. Pure.

A pack is a valid safetensors file: 8 bytes of header length, a JSON header padded with spaces so that data begins on a
page, then data without gaps. An entry is called `<tensor>@<flat index of its first element in the whole tensor>`; it
has the shape of its shard where the chunk is the whole shard, else one dim. Padding between chunks is an entry too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from ckptlib import dtypes
from ckptlib.box import Box
from ckptlib.keys import GenerationId, SaveId
from ckptlib.layout import Layout, TensorEntry
from ckptlib.manifest import Table
from ckptlib.plan import PAGE_BYTES, body_nbytes, round_up

MAX_HEAD_BYTES = 100_000_000
"""What safetensors' own reader takes."""

HEAD_BUDGET_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PackShape:
    """One pack of a part: a range of the body and the header's entries."""

    start: int
    """First byte in the body; a multiple of a page."""
    stop: int
    """Last byte + 1; a multiple of a page."""
    head_nbytes: int
    entries: str
    """JSON text of the header's entries, without braces."""
    dtypes: dict[str, str]
    """By entry: torch's dtype, where safetensors has no word for it."""

    @property
    def nbytes(self) -> int:
        return self.head_nbytes + self.stop - self.start

    def head(self, save: SaveId, rank: int, layout: str) -> bytes:
        """The first `head_nbytes` bytes of the object."""
        return _head(self.entries, self.dtypes, save, rank, layout).ljust(self.head_nbytes)


@dataclass(frozen=True, slots=True)
class Packing:
    """All packs of a part, and the table that says where its chunks lie in them."""

    packs: tuple[PackShape, ...]
    table: Table


def pack(table: Table, layout: Layout, pack_nbytes: int) -> Packing:
    """Cuts the body of a slot so that a pack is larger than `pack_nbytes` only where one chunk, or a block of small
    shards, is.

    `table`: of the slot. The same table always gives the same packing.
    """
    names = _entry_names(table, layout)
    cuts = _cuts(table, pack_nbytes, [len(name) + 100 for name, _ in names])
    packs, placed = [], {}
    for number, (start, stop, first, last) in enumerate(cuts):
        shape = _shape(table, names, start, stop, range(first, last))
        packs.append(shape)
        placed.update({c: (number, shape.head_nbytes + table.offsets[c] - start) for c in range(first, last)})
    moved = replace(
        table,
        packs=tuple(placed[c][0] for c in range(len(table.nbytes))),
        offsets=tuple(placed[c][1] for c in range(len(table.nbytes))),
    )
    return Packing(tuple(packs), moved)


def _cuts(table: Table, pack_nbytes: int, head_sizes: list[int]) -> list[tuple[int, int, int, int]]:
    """(start, stop, first chunk, last chunk + 1) of each pack; cuts fall on pages only."""
    cuts: list[tuple[int, int, int, int]] = []
    start = first = head = 0
    for c, (offset, nbytes) in enumerate(zip(table.offsets, table.nbytes, strict=True)):
        too_large = offset + nbytes - start > pack_nbytes or head + head_sizes[c] > HEAD_BUDGET_BYTES
        if too_large and offset % PAGE_BYTES == 0 and offset > start:
            cuts.append((start, offset, first, c))
            start, first, head = offset, c, 0
        head += head_sizes[c]
    if table.nbytes:
        cuts.append((start, body_nbytes(table), first, len(table.nbytes)))
    return cuts


def _entry_names(table: Table, layout: Layout) -> list[tuple[str, TensorEntry]]:
    """Per chunk."""
    found = []
    for shard, (tensor, box) in enumerate(zip(table.tensors, table.boxes, strict=True)):
        entry = layout.tensors[tensor]
        itemsize, done = dtypes.itemsize(entry.dtype), 0
        first = table.first_chunks[shard]
        for chunk in range(first, first + table.num_chunks[shard]):
            found.append((f"{entry.name}@{_flat_index(entry.shape, box, done)}", entry))
            done += table.nbytes[chunk] // itemsize
    return found


def _flat_index(shape: tuple[int, ...], box: Box, element: int) -> int:
    """Position in the whole tensor of a box's element, given by its position in the box; both row-major."""
    flat, stride = 0, 1
    for size, offset, extent in zip(reversed(shape), reversed(box.offset), reversed(box.shape), strict=True):
        element, index = divmod(element, extent)
        flat += (offset + index) * stride
        stride *= size
    return flat


def _shape(table: Table, names: list[tuple[str, TensorEntry]], start: int, stop: int, chunks: range) -> PackShape:
    whole = {table.first_chunks[s]: table.boxes[s].shape for s, n in enumerate(table.num_chunks) if n == 1}
    texts, foreign, end, gaps = [], {}, start, 0
    for c in chunks:
        offset, nbytes, (name, entry) = table.offsets[c], table.nbytes[c], names[c]
        if offset > end:
            texts.append(_entry(f"@slack.{gaps}", "U8", [offset - end], end - start, offset - start))
            gaps += 1
        if dtypes.has_own_word(entry.dtype):
            shape = list(whole.get(c, (nbytes // dtypes.itemsize(entry.dtype),)))
        else:
            shape = [nbytes]
            foreign[name] = entry.dtype
        end = offset + nbytes
        texts.append(_entry(name, dtypes.safetensors_name(entry.dtype), shape, offset - start, end - start))
    if stop > end:
        texts.append(_entry(f"@slack.{gaps}", "U8", [stop - end], end - start, stop - start))
    entries = ",".join(texts)
    # every save's head is as long as this one's: its numbers have fixed width
    longest = _head(entries, foreign, _WIDEST, 0, "0" * 32)
    return PackShape(start, stop, round_up(len(longest)), entries, foreign)


def _entry(name: str, dtype: str, shape: list[int], start: int, stop: int) -> str:
    sizes = ",".join(map(str, shape))
    return f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{start},{stop}]}}'


def _head(entries: str, foreign: dict[str, str], save: SaveId, rank: int, layout: str) -> bytes:
    metadata = {"ckptlib": "1", "save": str(save), "rank": f"{rank:06d}", "layout": layout}
    if foreign:
        metadata["dtypes"] = json.dumps(foreign)
    text = f'{{"__metadata__":{json.dumps(metadata)},{entries}}}'.encode()
    padded = text.ljust(round_up(8 + len(text)) - 8)
    return len(padded).to_bytes(8, "little") + padded


_WIDEST = SaveId(0, GenerationId(0, "0" * 8))
