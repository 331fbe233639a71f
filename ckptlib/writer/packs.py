"""How chunks in the body of a slot are made into packs, and the safetensors header of each. Pure.

A pack is a valid safetensors file: 8 bytes of header length, a JSON header padded with spaces so that data begins on a
page, then data without gaps. An entry is a shard, or a chunk of one that has several. It is called `<tensor>@<flat
index of its first element in the whole tensor>`. It has the shape of its shard if it is the whole of it, else one dim.
What lies between chunks is an entry too: padding, or a few bytes of a chunk that is not in the pack, which keep the
alignment of the next one. The name and shape of an entry of whole rows say where it lies in its tensor; the metadata
say so of any other entry, so that packs alone are enough to rebuild the tensors.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ckptlib.format import dtypes
from ckptlib.format.box import Box
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import Layout
from ckptlib.format.table import Table
from ckptlib.format.values import Json
from ckptlib.pages import PAGE_BYTES, round_up

MAX_HEAD_BYTES = 100_000_000
"""The largest header that safetensors' own reader takes."""

HEAD_BUDGET_BYTES = 64 * 1024 * 1024

ALIGN_BYTES = 64
"""A chunk lies in a pack as in the slot, modulo this: views of it stay aligned to their elements."""


class Piece(NamedTuple):
    """A range of the body of a slot."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PackShape:
    """One pack of a part: its chunks, and the header's entries."""

    pieces: tuple[Piece, ...]
    """Ranges of the body, one behind the other; whole pages if the chunks in them are. A pack of frames has none."""
    data_nbytes: int
    """Bytes behind the header."""
    head_nbytes: int
    entries: str
    """JSON text of the header's entries, without braces."""
    told: str
    """JSON text of what else the metadata tell, without braces; with a comma before it if there is any."""
    version: str
    """Version of the format; "2" if there are frames."""

    @property
    def nbytes(self) -> int:
        return self.head_nbytes + self.data_nbytes

    def head(self, save: SaveId, rank: int, layout: str) -> bytes:
        """Returns the first bytes of the pack: `head_nbytes`, or as many pages as it takes if that does not suffice."""
        metadata = {"ckptlib": self.version, "save": str(save), "rank": f"{rank:06d}", "layout": layout}
        text = f'{{"__metadata__":{json.dumps(metadata)[:-1]}{self.told}}},{self.entries}}}'.encode()
        padded = text.ljust(max(round_up(8 + len(text)), self.head_nbytes) - 8)
        return len(padded).to_bytes(8, "little") + padded


LONGEST_CODEC = "x" * 32
"""No codec's name is longer."""


class Framed(NamedTuple):
    """A chunk that is stored as a frame."""

    chunk: int
    codec: str
    nbytes: int
    """Bytes of the frame."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Packs, and where each of the packed chunks lies in them; in the order of the chunks."""

    packs: tuple[PackShape, ...]
    chunks: tuple[int, ...]
    """Positions in the slot's table; ascending."""
    numbers: tuple[int, ...]
    """Position in `packs` of each packed chunk; ascending."""
    offsets: tuple[int, ...]
    """Offset of each packed chunk in the pack's file."""

    def rows(self, number: int) -> list[tuple[int, int]]:
        """Returns each chunk of one pack, and its offset there."""
        own = slice(bisect_left(self.numbers, number), bisect_right(self.numbers, number))
        return [*zip(self.chunks[own], self.offsets[own], strict=True)]


class Packer:
    """Packs chunks of slots with one table. Keeps headers that are the same from one save to the next."""

    def __init__(self, table: Table, layout: Layout, pack_nbytes: int) -> None:
        """`pack_nbytes`: most bytes of a pack, unless one chunk, or a block of small shards, has more."""
        self.table = table
        self._layout, self._pack_nbytes = layout, pack_nbytes
        self._sizes = table.sizes(layout)
        self._begins = table.begins(self._sizes)
        self._known: dict[tuple[int, ...], Packing] = {}
        self._entries: dict[int, list[_Entry]] = {}
        """The header's entries for each chunk."""

    def pack(self, chunks: tuple[int, ...]) -> Packing:
        """Returns the packing of these chunks, ascending. The same chunks always give the same packing."""
        if chunks not in self._known:
            if len(self._known) >= KNOWN_PACKINGS:
                del self._known[next(iter(self._known))]
            self._known[chunks] = self._pack(chunks)
        return self._known[chunks]

    def _pack(self, chunks: tuple[int, ...]) -> Packing:
        packs: list[PackShape] = []
        numbers: list[int] = []
        offsets: list[int] = []
        for some in self._cuts(chunks):
            pieces, positions = _pieces(self.table, some)
            shape = self._shape(some, positions, pieces)
            numbers += [len(packs)] * len(some)
            offsets += [shape.head_nbytes + position for position in positions]
            packs.append(shape)
        return Packing(tuple(packs), chunks, tuple(numbers), tuple(offsets))

    def _shape(self, chunks: Sequence[int], positions: Sequence[int], pieces: tuple[Piece, ...]) -> PackShape:
        """Returns the shape of one pack. `positions`: offsets of the chunks behind the header."""
        texts: list[str] = []
        told: dict[str, dict[str, Json]] = {"dtypes": {}, "boxes": {}}
        end, gaps, stop = 0, 0, sum(piece.stop - piece.start for piece in pieces)
        for chunk, position in zip(chunks, positions, strict=True):
            moved = position - self.table.offsets[chunk]
            for entry in self._entries_of(chunk):
                at = entry.offset + moved
                if at > end:
                    texts.append(f"{_text(f'@slack.{gaps}', 'U8', (at - end,))}[{end},{at}]}}")
                    gaps += 1
                end = at + entry.nbytes
                texts.append(f"{entry.text}[{at},{end}]}}")
                if not entry.has_word:
                    told["dtypes"][entry.name] = entry.dtype
                if not entry.is_plain:
                    told["boxes"][entry.name] = entry.box
        if stop > end:
            texts.append(f"{_text(f'@slack.{gaps}', 'U8', (stop - end,))}[{end},{stop}]}}")
        return _shape(pieces, stop, texts, told)

    def _cuts(self, chunks: Sequence[int]) -> Iterator[list[int]]:
        """Yields the chunks of each pack. A pack can end where the next chunk begins on a page, or is no neighbour."""
        table, some = self.table, list[int]()
        nbytes = head = 0
        for chunk in chunks:
            size, added = table.nbytes[chunk], sum([entry.head_nbytes for entry in self._entries_of(chunk)])
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

    def frame_runs(self, chunks: Sequence[int]) -> list[tuple[Sequence[int], int]]:
        """Cuts the chunks into runs whose frames fit one pack. Returns each run, with the room for its pack's header.

        It suffices, since no frame is larger than its chunk.
        """
        if not chunks:
            return []
        longest = [Framed(chunk, LONGEST_CODEC, self.table.nbytes[chunk]) for chunk in chunks]
        head_nbytes = self.pack_frames(longest)[0].head_nbytes
        if head_nbytes <= HEAD_BUDGET_BYTES or len(chunks) == 1:
            return [(chunks, head_nbytes)]
        half = len(chunks) // 2
        return [*self.frame_runs(chunks[:half]), *self.frame_runs(chunks[half:])]

    def pack_frames(self, frames: Sequence[Framed], head_nbytes: int = 0) -> tuple[PackShape, list[int]]:
        """Returns one pack of frames, one behind the other, and where each of them lies in its file.

        `head_nbytes`: length of the header, if that was fixed beforehand and suffices.
        """
        texts, ends = [], [*itertools.accumulate(frame.nbytes for frame in frames)]
        told: dict[str, dict[str, Json]] = {"dtypes": {}, "boxes": {}, "codecs": {}}
        for frame, end in zip(frames, ends, strict=True):
            [entry] = self._entries_of(frame.chunk)
            texts.append(f"{_text(entry.name, 'U8', (frame.nbytes,))}[{end - frame.nbytes},{end}]}}")
            told["dtypes"][entry.name] = entry.dtype
            told["boxes"][entry.name] = entry.box
            told["codecs"][entry.name] = frame.codec
        shape = _shape((), ends[-1], texts, told, head_nbytes)
        return shape, [shape.head_nbytes + end - frame.nbytes for frame, end in zip(frames, ends, strict=True)]

    def _entries_of(self, chunk: int) -> list[_Entry]:
        """Returns the header's entries for a chunk: one for each shard in it."""
        if chunk not in self._entries:
            self._entries[chunk] = [*map(partial(self._entry, chunk), self.table.shards_in(chunk))]
        return self._entries[chunk]

    def _entry(self, chunk: int, shard: int) -> _Entry:
        table = self.table
        tensor, box, at = self._layout.tensors[table.tensors[shard]], table.boxes[shard], 0
        if table.num_chunks[shard] <= 1:
            begin, nbytes, shape = self._begins[shard], self._sizes[shard], box.shape
        else:
            itemsize = dtypes.itemsize(tensor.dtype)
            begin, nbytes = table.offsets[chunk], table.nbytes[chunk]
            at = (begin - table.offsets[table.first_chunks[shard]]) // itemsize
            shape = (nbytes // itemsize,)
        name, has_word = f"{tensor.name}@{_flat_index(tensor.shape, box, at)}", dtypes.has_own_word(tensor.dtype)
        rows = len(shape) == len(tensor.shape) and shape[1:] == tensor.shape[1:]
        text = _text(name, dtypes.safetensors_name(tensor.dtype), shape if has_word else (nbytes,))
        place: Json = [list(tensor.shape), list(box.offset), list(box.shape)]
        is_plain = rows and has_word
        told = (not has_word) * (len(name) + 30) + (not is_plain) * (len(name) + 70)
        return _Entry(name, tensor.dtype, has_word, place, is_plain, begin, nbytes, text, len(text) + 30 + told)


KNOWN_PACKINGS = 4
"""Packings that are kept of one table: often the same chunks change at every save."""


def _pieces(table: Table, chunks: Sequence[int]) -> tuple[tuple[Piece, ...], list[int]]:
    """Returns the ranges of the body that hold these chunks, and where each chunk lies when they follow one another.

    Neighbours are one range. A range ends with a page if no other chunk has a part of that page.
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
    """Yields the first and the last of each run of chunks that follow one another."""
    first = last = chunks[0]
    for chunk in chunks[1:]:
        if chunk != last + 1:
            yield first, last
            first = chunk
        last = chunk
    yield first, last


class _Entry(NamedTuple):
    """A header's entry for a shard, or for one chunk of it, without its place in the pack."""

    name: str
    dtype: str
    has_word: bool
    """Whether safetensors has a word for its dtype."""
    box: Json
    """Shape of the tensor, offset and shape of the shard."""
    is_plain: bool
    """Whether its name and shape tell the box, too."""
    offset: int
    """Offset in the body."""
    nbytes: int
    text: str
    """JSON of the entry, up to its offsets."""
    head_nbytes: int
    """About how many bytes it takes in a header."""


def _flat_index(shape: tuple[int, ...], box: Box, element: int) -> int:
    """Returns the position in the whole tensor of a box's element, given its position in the box; both row-major."""
    flat, stride = 0, 1
    for size, offset, extent in zip(reversed(shape), reversed(box.offset), reversed(box.shape), strict=True):
        element, index = divmod(element, extent)
        flat += (offset + index) * stride
        stride *= size
    return flat


Told = Mapping[str, Mapping[str, Json]]
"""What else the metadata tell of entries, by what it is: torch's dtype, if safetensors has no word for it; shape of the
tensor, offset and shape of the shard, if name and shape do not tell; the codec, of a frame."""


def _shape(
    pieces: tuple[Piece, ...], data_nbytes: int, texts: Sequence[str], told: Told, head_nbytes: int = 0
) -> PackShape:
    """Returns the shape of a pack. `head_nbytes`: of the header, at least."""
    dumped = {what: json.dumps(of, separators=(",", ":")) for what, of in told.items() if of}
    text = "".join(f", {json.dumps(what)}: {json.dumps(of)}" for what, of in dumped.items())
    version = "2" if told.get("codecs") else "1"
    shape = PackShape(pieces, data_nbytes, head_nbytes, ",".join(texts), text, version)
    # every save's head is as long as this one's: its numbers have fixed width
    return replace(shape, head_nbytes=len(shape.head(_WIDEST, 0, "0" * 32)))


def _text(name: str, dtype: str, shape: tuple[int, ...]) -> str:
    """Returns the JSON of an entry, up to its offsets."""
    sizes = ",".join(map(str, shape))
    return f'{json.dumps(name)}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":'


_WIDEST = SaveId(0, GenerationId(0, "0" * 8))
