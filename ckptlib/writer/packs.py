"""How the body of a slot is cut into packs, and the safetensors header of each. Pure.

A pack is a valid safetensors file: 8 bytes of header length, a JSON header padded with spaces so that data begins on a
page, then data without gaps. An entry is a shard, or a chunk of one that has several. It is called
`<tensor>@<flat index of its first element in the whole tensor>`; it has the shape of its shard where it is the whole of
it, else one dim. Padding between chunks is an entry too. The name and shape of an entry of whole rows say where it
lies in its tensor; of any other entry the metadata tell, so that packs alone are enough to rebuild the tensors.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckptlib.format import dtypes
from ckptlib.format.body_layout import body_nbytes
from ckptlib.format.box import Box
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import Layout, TensorSpec
from ckptlib.format.table import Table
from ckptlib.pages import PAGE_BYTES, round_up

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
    boxes: dict[str, list[tuple[int, ...]]]
    """By entry, where its name and shape do not tell: shape of the tensor, offset and shape of the shard."""

    @property
    def nbytes(self) -> int:
        return self.head_nbytes + self.stop - self.start

    def head(self, save: SaveId, rank: int, layout: str) -> bytes:
        """The first `head_nbytes` bytes of the object."""
        return _head(self.entries, self.dtypes, self.boxes, save, rank, layout).ljust(self.head_nbytes)


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
    entries = _entries(table, layout)
    head_sizes = [0] * len(table.nbytes)
    for entry in entries:
        head_sizes[entry.chunk] += _head_nbytes(entry)
    packs: list[PackShape] = []
    numbers: list[int] = []
    offsets: list[int] = []
    of_chunk = [entry.chunk for entry in entries]
    for start, stop, first, last in _cuts(table, pack_nbytes, head_sizes):
        here = entries[bisect_left(of_chunk, first) : bisect_left(of_chunk, last)]
        shape = _shape(here, start, stop)
        numbers += [len(packs)] * (last - first)
        offsets += [shape.head_nbytes + offset - start for offset in table.offsets[first:last]]
        packs.append(shape)
    return Packing(tuple(packs), replace(table, packs=tuple(numbers), offsets=tuple(offsets)))


class _Cut(NamedTuple):
    """What of a body goes into one pack."""

    start: int
    stop: int
    """Bytes: from and to, on pages."""
    first: int
    last: int
    """Chunks: from and up to, without."""


def _cuts(table: Table, pack_nbytes: int, head_sizes: list[int]) -> list[_Cut]:
    """One for each pack."""
    cuts: list[_Cut] = []
    start = first = head = 0
    for c, (offset, nbytes) in enumerate(zip(table.offsets, table.nbytes, strict=True)):
        too_large = offset + nbytes - start > pack_nbytes or head + head_sizes[c] > HEAD_BUDGET_BYTES
        if too_large and offset % PAGE_BYTES == 0 and offset > start:
            cuts.append(_Cut(start, offset, first, c))
            start, first, head = offset, c, 0
        head += head_sizes[c]
    if table.nbytes:
        cuts.append(_Cut(start, body_nbytes(table), first, len(table.nbytes)))
    return cuts


@dataclass(frozen=True, slots=True)
class _Entry(TensorSpec):
    """What a header says of a shard, or of one chunk of it; name and shape are its own."""

    chunk: int
    offset: int
    """In the body."""
    nbytes: int
    box: list[tuple[int, ...]] | None
    """What the metadata say of it; None: its name and shape tell."""


def _entries(table: Table, layout: Layout) -> list[_Entry]:
    """In the order of the chunks."""
    found: list[_Entry] = []
    sizes = table.sizes(layout)
    for shard, (begin, nbytes) in enumerate(zip(table.begins(sizes), sizes, strict=True)):
        tensor, box = layout.tensors[table.tensors[shard]], table.boxes[shard]
        first, name = table.first_chunks[shard], f"{tensor.name}@{_flat_index(tensor.shape, box, 0)}"
        if table.num_chunks[shard] <= 1:
            told = _told(tensor, box, box.shape)
            found.append(_Entry(name, tensor.dtype, box.shape, first, begin, nbytes, told))
            continue
        itemsize, done = dtypes.itemsize(tensor.dtype), 0
        for chunk in table.chunks(shard):
            count = table.nbytes[chunk] // itemsize
            name = f"{tensor.name}@{_flat_index(tensor.shape, box, done)}"
            told = _told(tensor, box, (count,))
            found.append(_Entry(name, tensor.dtype, (count,), chunk, table.offsets[chunk], table.nbytes[chunk], told))
            done += count
    return found


def _told(tensor: TensorSpec, box: Box, shape: tuple[int, ...]) -> list[tuple[int, ...]] | None:
    """What the metadata say of an entry of this shape."""
    rows = len(shape) == len(tensor.shape) and shape[1:] == tensor.shape[1:]
    return None if rows and dtypes.has_own_word(tensor.dtype) else [tensor.shape, box.offset, box.shape]


def _flat_index(shape: tuple[int, ...], box: Box, element: int) -> int:
    """Position in the whole tensor of a box's element, given by its position in the box; both row-major."""
    flat, stride = 0, 1
    for size, offset, extent in zip(reversed(shape), reversed(box.offset), reversed(box.shape), strict=True):
        element, index = divmod(element, extent)
        flat += (offset + index) * stride
        stride *= size
    return flat


def _shape(entries: Sequence[_Entry], start: int, stop: int) -> PackShape:
    texts, foreign, end, gaps = [], {}, start, 0
    boxes = {entry.name: entry.box for entry in entries if entry.box is not None}
    for entry in entries:
        if entry.offset > end:
            texts.append(_text(f"@slack.{gaps}", "U8", (entry.offset - end,), end - start, entry.offset - start))
            gaps += 1
        end, shape = entry.offset + entry.nbytes, entry.shape
        if not dtypes.has_own_word(entry.dtype):
            shape = (entry.nbytes,)
            foreign[entry.name] = entry.dtype
        word = dtypes.safetensors_name(entry.dtype)
        texts.append(_text(entry.name, word, shape, entry.offset - start, end - start))
    if stop > end:
        texts.append(_text(f"@slack.{gaps}", "U8", (stop - end,), end - start, stop - start))
    text = ",".join(texts)
    # every save's head is as long as this one's: its numbers have fixed width
    longest = _head(text, foreign, boxes, _WIDEST, 0, "0" * 32)
    return PackShape(start, stop, round_up(len(longest)), text, foreign, boxes)


def _head_nbytes(entry: _Entry) -> int:
    """About what an entry takes in a header."""
    name = len(json.dumps(entry.name))
    metadata = (not dtypes.has_own_word(entry.dtype)) * (name + 30) + (entry.box is not None) * (name + 70)
    return name + 100 + metadata


def _text(name: str, dtype: str, shape: tuple[int, ...], start: int, stop: int) -> str:
    sizes = ",".join(map(str, shape))
    return f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{start},{stop}]}}'


def _head(
    entries: str,
    foreign: dict[str, str],
    boxes: dict[str, list[tuple[int, ...]]],
    save: SaveId,
    rank: int,
    layout: str,
) -> bytes:
    metadata = {"ckptlib": "1", "save": str(save), "rank": f"{rank:06d}", "layout": layout}
    if foreign:
        metadata["dtypes"] = json.dumps(foreign)
    if boxes:
        metadata["boxes"] = json.dumps(boxes, separators=(",", ":"))
    text = f'{{"__metadata__":{json.dumps(metadata)},{entries}}}'.encode()
    padded = text.ljust(round_up(8 + len(text)) - 8)
    return len(padded).to_bytes(8, "little") + padded


_WIDEST = SaveId(0, GenerationId(0, "0" * 8))
