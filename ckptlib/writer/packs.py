"""How chunks in the body of a slot are made into packs, and the safetensors header of each. Pure.

A pack is a valid safetensors file: 8 bytes of header length, a JSON header padded with spaces so that data begins on a
page, then data without gaps. An entry is a shard, or a chunk of one that has several. It is called
`<tensor>@<flat index of its first element in the whole tensor>`; it has the shape of its shard where it is the whole of
it, else one dim. What lies between chunks is an entry too: padding, or a few bytes of a chunk that is not in the pack,
which keep the alignment of the next one. The name and shape of an entry of whole rows say where it lies in its tensor;
of any other entry the metadata tell, so that packs alone are enough to rebuild the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckptlib.format import dtypes
from ckptlib.format.box import Box
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import Layout, TensorSpec
from ckptlib.format.table import Table
from ckptlib.pages import PAGE_BYTES, round_up

MAX_HEAD_BYTES = 100_000_000
"""What safetensors' own reader takes."""

HEAD_BUDGET_BYTES = 64 * 1024 * 1024


ALIGN_BYTES = 64
"""A chunk lies in a pack as it lies in the slot, by this measure: views of it stay aligned to their elements."""


class Piece(NamedTuple):
    """A range of the body of a slot."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackShape:
    """One pack of a part: ranges of the body, one behind the other, and the header's entries."""

    pieces: tuple[Piece, ...]
    """Whole pages wherever the chunks in them are."""
    head_nbytes: int
    entries: str
    """JSON text of the header's entries, without braces."""
    dtypes: dict[str, str]
    """By entry: torch's dtype, where safetensors has no word for it."""
    boxes: dict[str, list[tuple[int, ...]]]
    """By entry, where its name and shape do not tell: shape of the tensor, offset and shape of the shard."""

    @property
    def nbytes(self) -> int:
        return self.head_nbytes + sum(piece.stop - piece.start for piece in self.pieces)

    def head(self, save: SaveId, rank: int, layout: str) -> bytes:
        """The first bytes of the pack."""
        return _head(self.entries, self.dtypes, self.boxes, save, rank, layout).ljust(self.head_nbytes)


@dataclass(frozen=True, slots=True)
class Packing:
    """Packs, and where each of the packed chunks lies in them; in the order of the chunks."""

    packs: tuple[PackShape, ...]
    chunks: tuple[int, ...]
    """Positions in the slot's table; ascending."""
    numbers: tuple[int, ...]
    """Per packed chunk: position in `packs`."""
    offsets: tuple[int, ...]
    """Per packed chunk: in the pack's file."""


class Packer:
    """Packs chunks of slots with one table. Keeps what is the same from one save to the next."""

    def __init__(self, table: Table, layout: Layout, pack_nbytes: int) -> None:
        """A pack is larger than `pack_nbytes` only where one chunk, or a block of small shards, is."""
        self.table = table
        self._layout, self._pack_nbytes = layout, pack_nbytes
        self._sizes = table.sizes(layout)
        self._begins = table.begins(self._sizes)
        self._known: dict[tuple[int, ...], Packing] = {}

    def pack(self, chunks: tuple[int, ...]) -> Packing:
        """Of these chunks, ascending. The same chunks always give the same packing."""
        if chunks not in self._known:
            if len(self._known) >= KNOWN_PACKINGS:
                del self._known[next(iter(self._known))]
            self._known[chunks] = self._pack(chunks)
        return self._known[chunks]

    def _pack(self, chunks: tuple[int, ...]) -> Packing:
        entries = {chunk: self._entries(chunk) for chunk in chunks}
        packs: list[PackShape] = []
        numbers: list[int] = []
        offsets: list[int] = []
        for some in self._cuts(chunks, entries):
            pieces, positions = _pieces(self.table, some)
            here = dict(zip(some, positions, strict=True))
            shape = _shape([entry for chunk in some for entry in entries[chunk]], self.table, here, pieces)
            numbers += [len(packs)] * len(some)
            offsets += [shape.head_nbytes + position for position in positions]
            packs.append(shape)
        return Packing(tuple(packs), chunks, tuple(numbers), tuple(offsets))

    def _cuts(self, chunks: Sequence[int], entries: Mapping[int, Sequence[_Entry]]) -> Iterator[list[int]]:
        """The chunks of each pack. Where the next one begins on a page, or is no neighbour, a pack can end."""
        table, some = self.table, list[int]()
        nbytes = head = 0
        for chunk in chunks:
            size, added = table.nbytes[chunk], sum(map(_head_nbytes, entries[chunk]))
            too_large = nbytes + size > self._pack_nbytes or head + added > HEAD_BUDGET_BYTES
            if some and too_large and (table.offsets[chunk] % PAGE_BYTES == 0 or chunk != some[-1] + 1):
                yield some
                some, nbytes, head = [], 0, 0
            if some and chunk == some[-1] + 1:  # with what lies between them
                nbytes += table.offsets[chunk] - table.offsets[some[-1]] - table.nbytes[some[-1]]
            some.append(chunk)
            nbytes, head = nbytes + size, head + added
        if some:
            yield some

    def _entries(self, chunk: int) -> list[_Entry]:
        """What a header says of a chunk: an entry for each shard in it."""
        table, found = self.table, []
        for shard in table.shards_in(chunk):
            tensor, box = self._layout.tensors[table.tensors[shard]], table.boxes[shard]
            if table.num_chunks[shard] <= 1:
                begin, nbytes, shape = self._begins[shard], self._sizes[shard], box.shape
                name = f"{tensor.name}@{_flat_index(tensor.shape, box, 0)}"
            else:
                itemsize, first = dtypes.itemsize(tensor.dtype), table.first_chunks[shard]
                begin, nbytes = table.offsets[chunk], table.nbytes[chunk]
                done = (begin - table.offsets[first]) // itemsize
                shape = (nbytes // itemsize,)
                name = f"{tensor.name}@{_flat_index(tensor.shape, box, done)}"
            found.append(_Entry(name, tensor.dtype, shape, chunk, begin, nbytes, _told(tensor, box, shape)))
        return found


KNOWN_PACKINGS = 4
"""Of one table: what changes and what stays is often the same at every save."""


def _pieces(table: Table, chunks: Sequence[int]) -> tuple[tuple[Piece, ...], list[int]]:
    """The ranges of the body that hold these chunks, and where each chunk lies when they follow one another.

    Neighbours are one range. A range ends with a page where no other chunk has a part of that.
    """
    pieces: list[Piece] = []
    positions: list[int] = []
    base = 0
    for first, last in _runs(chunks):
        start, end = table.offsets[first], table.offsets[last] + table.nbytes[last]
        start -= start % ALIGN_BYTES
        beyond = table.offsets[last + 1] if last + 1 < len(table.offsets) else round_up(end)
        stop = round_up(end) if round_up(end) <= beyond else end + -end % ALIGN_BYTES
        positions += [base + table.offsets[chunk] - start for chunk in range(first, last + 1)]
        pieces.append(Piece(start, stop))
        base += stop - start
    return tuple(pieces), positions


def _runs(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of those that follow one another."""
    first = last = chunks[0]
    for chunk in chunks[1:]:
        if chunk != last + 1:
            yield first, last
            first = chunk
        last = chunk
    yield first, last


@dataclass(frozen=True, slots=True)
class _Entry(TensorSpec):
    """What a header says of a shard, or of one chunk of it; name and shape are its own."""

    chunk: int
    offset: int
    """In the body."""
    nbytes: int
    box: list[tuple[int, ...]] | None
    """What the metadata say of it; None: its name and shape tell."""


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


def _shape(
    entries: Sequence[_Entry], table: Table, positions: Mapping[int, int], pieces: tuple[Piece, ...]
) -> PackShape:
    """`positions`: of the chunks, behind the header."""
    texts, foreign, end, gaps = [], {}, 0, 0
    boxes = {entry.name: entry.box for entry in entries if entry.box is not None}
    for entry in entries:
        at = positions[entry.chunk] + entry.offset - table.offsets[entry.chunk]
        if at > end:
            texts.append(_text(f"@slack.{gaps}", "U8", (at - end,), end, at))
            gaps += 1
        end, shape = at + entry.nbytes, entry.shape
        if not dtypes.has_own_word(entry.dtype):
            shape = (entry.nbytes,)
            foreign[entry.name] = entry.dtype
        texts.append(_text(entry.name, dtypes.safetensors_name(entry.dtype), shape, at, end))
    stop = sum(piece.stop - piece.start for piece in pieces)
    if stop > end:
        texts.append(_text(f"@slack.{gaps}", "U8", (stop - end,), end, stop))
    text = ",".join(texts)
    # every save's head is as long as this one's: its numbers have fixed width
    longest = _head(text, foreign, boxes, _WIDEST, 0, "0" * 32)
    return PackShape(pieces, round_up(len(longest)), text, foreign, boxes)


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
