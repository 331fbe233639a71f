"""Tables: which shards of a rank lie where, chunk by chunk. Types and JSON; no I/O."""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from ckptlib.errors import FormatError
from ckptlib.format import dtypes
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.documents import Fields, dump_body
from ckptlib.format.layout import Layout, TensorEntry, check_spread, decode_shapes
from ckptlib.format.values import Json

if TYPE_CHECKING:
    import numpy.typing as npt

Codes: TypeAlias = "npt.NDArray[np.int64]"
"""Per shard: a small number, equal for those that are alike."""


def distinct(codes: Codes, bound: int) -> tuple[Codes, Codes, Codes]:
    """Ascending: those that differ; of each, the position of one that is it; and of all, their positions in these.

    `bound`: all are below it. Where it is small they need not be sorted.
    """
    if bound > 64 * (len(codes) + 64):
        return np.unique(codes, return_index=True, return_inverse=True)
    at = np.full(bound, -1, np.int64)
    at[codes] = np.arange(len(codes))
    found = np.flatnonzero(at >= 0)
    firsts = at[found]
    at[found] = np.arange(len(found))
    return found, firsts, at[codes]


class ShardColumns(NamedTuple):
    """Of the shards of a table: what depends neither on where their boxes begin, nor on where their chunks lie."""

    of_tensor: Mapping[int, Sequence[int]]
    """By position in the layout's tensors: its shards."""
    dtypes: Sequence[str]
    sizes: Sequence[int]
    """Bytes of each."""
    skipped: Sequence[int]
    """Bytes of the first chunk of each that lie before it."""


@dataclass(frozen=True)
class Table:
    """What lies where: shards, each cut into chunks that follow one another in its row-major order.

    Small shards share a chunk: one with no chunk of its own lies in that of the shard before it, right behind it.

    How shards are cut is the same at every save as long as the layout is; where the chunks lie is not. Offsets count
    from the first byte of a pack; in a slot, from the first byte of its body.
    """

    layout: str
    """Digest of the layout whose tensors are meant."""
    tensors: tuple[int, ...]
    """Per shard: position in the layout's tensors."""
    boxes: tuple[Box, ...]
    """Per shard: in the tensor's global coordinates."""
    num_chunks: tuple[int, ...]
    """Per shard; 0: it lies in the chunk of the shard before it, which is one chunk."""
    packs: tuple[int, ...]
    """Per chunk: position in the part's packs."""
    offsets: tuple[int, ...]
    """Per chunk, in bytes."""
    nbytes: tuple[int, ...]
    """Per chunk."""

    @cached_property
    def encoded(self) -> str:
        """JSON text: how shards are cut, and where the chunks lie. In slots, and in parts of version 1."""
        columns: dict[str, Json] = {"pack": list(self.packs), "offset": list(self.offsets)}
        return dump_body({**self._shards(), "chunks": {**columns, "nbytes": list(self.nbytes)}})

    @cached_property
    def cuts(self) -> str:
        """JSON text: how shards are cut, and no more."""
        return dump_body({**self._shards(), "chunks": {"nbytes": list(self.nbytes)}})

    def _shards(self) -> dict[str, Json]:
        return {
            "layout": self.layout,
            "shards": {
                "tensor": list(self.tensors),
                "offset": [box.offset for box in self.boxes],  # type: ignore[misc]
                "shape": [box.shape for box in self.boxes],  # type: ignore[misc]
                "chunks": list(self.num_chunks),
            },
        }

    @cached_property
    def digest(self) -> str:
        return digester(XXH3)(self.encoded.encode())

    @cached_property
    def cuts_digest(self) -> str:
        """Equal for tables that cut the shards of equal layouts alike, wherever their chunks lie."""
        return digester(XXH3)(self.cuts.encode())

    def placed(self, packs: Sequence[int], offsets: Sequence[int]) -> Table:
        """The same shards, cut alike, with their chunks elsewhere."""
        table = replace(self, packs=tuple(packs), offsets=tuple(offsets))
        kept = ("cuts", "cuts_digest", "first_chunks", "tensor_codes", "box_codes", "_fitting", "_columns")
        for name in kept:  # do not tell where chunks lie, and take a while to make
            if name in self.__dict__:
                table.__dict__[name] = self.__dict__[name]
        return table

    def with_boxes(self, boxes: tuple[Box, ...], codes: Codes) -> Table:
        """The same shards, of the same shapes, elsewhere in their tensors. `codes`: see `box_codes`."""
        table = replace(self, boxes=boxes)
        table.__dict__["box_codes"] = codes
        for name in ("tensor_codes", "first_chunks", "_fitting", "_columns"):  # do not tell where boxes begin
            table.__dict__[name] = getattr(self, name)
        return table

    @cached_property
    def tensor_codes(self) -> Codes:
        """Of `tensors`: themselves."""
        return np.array(self.tensors, np.int64)

    @cached_property
    def box_codes(self) -> Codes:
        """Of `boxes`; those of boxes that differ differ."""
        numbers: dict[int, int] = {}
        return np.array([numbers.setdefault(id(box), len(numbers)) for box in self.boxes], np.int64)

    @cached_property
    def _fitting(self) -> set[str]:
        """Digest of the layout, when shapes and chunks are known to fit it: of all that differ only in where boxes
        begin."""
        return set()

    @cached_property
    def _columns(self) -> dict[str, ShardColumns]:
        """By the layout's digest; shared as `_fitting` is."""
        return {}

    def columns(self, layout: Layout) -> ShardColumns:
        """Of a table that fits the layout. One object for all tables that cut shards of these shapes alike."""
        found = self._columns.get(layout.digest)
        if found is None:
            alone = zip(range(len(self.tensors)), strict=True)
            of_tensor: dict[int, Sequence[int]] = dict(zip(self.tensors, alone, strict=True))
            if len(of_tensor) < len(self.tensors):  # a tensor has several
                several: dict[int, list[int]] = {}
                for shard, tensor in enumerate(self.tensors):
                    several.setdefault(tensor, []).append(shard)
                of_tensor = {**several}
            names, sizes, skipped = [layout.tensors[tensor].dtype for tensor in self.tensors], self.sizes(layout), []
            end = 0
            for count, nbytes in zip(self.num_chunks, sizes, strict=True):
                skipped.append(0 if count else end)
                end = skipped[-1] + nbytes
            found = self._columns[layout.digest] = ShardColumns(of_tensor, names, sizes, skipped)
        return found

    @cached_property
    def first_chunks(self) -> tuple[int, ...]:
        """Per shard: position of the chunk in which it begins."""
        stops = itertools.accumulate(self.num_chunks)
        return tuple(stop - (count or 1) for stop, count in zip(stops, self.num_chunks, strict=True))

    def chunks(self, shard: int) -> range:
        """Positions of the chunks in which a shard lies."""
        first = self.first_chunks[shard]
        return range(first, first + (self.num_chunks[shard] or 1))

    def is_shared(self, shard: int) -> bool:
        """Whether other shards lie in its chunk."""
        return 0 in (self.num_chunks[shard], *self.num_chunks[shard + 1 : shard + 2])

    def begins(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Per shard: where its first byte lies, as `offsets` count. `sizes`: bytes of each shard."""
        found, end = [], 0
        for first, count, nbytes in zip(self.first_chunks, self.num_chunks, sizes, strict=True):
            begin = self.offsets[first] if count else end
            found.append(begin)
            end = begin + nbytes
        return tuple(found)

    def sizes(self, layout: Layout) -> list[int]:
        """Per shard: its bytes."""
        examples, kinds = self._kinds(layout)
        nbytes = [shard_nbytes(layout.tensors[self.tensors[shard]], self.boxes[shard]) for shard in examples]
        return [*map(nbytes.__getitem__, kinds.tolist())]

    def _kinds(self, layout: Layout) -> tuple[list[int], Codes]:
        """A shard of each kind, and the kind of each shard: of one kind are those with the same box of tensors
        of the same shape and dtype.

        Thousands of shards are of few kinds, and equal boxes are one object.
        """
        num_boxes = int(self.box_codes.max(initial=0)) + 1
        codes = layout.alike_codes[self.tensor_codes] * num_boxes + self.box_codes
        _, examples, kinds = distinct(codes, len(layout.tensors) * num_boxes)
        return examples.tolist(), kinds

    def shards_in(self, chunk: int) -> list[int]:
        """Positions of the shards that lie in a chunk, at least in part."""
        first = bisect_left(self.first_chunks, chunk)
        last = bisect_right(self.first_chunks, chunk)
        return [*range(first, last)] or [first - 1]  # one that begins in an earlier chunk

    def describe(self, chunk: int, layout: Layout) -> str:
        """What lies in a chunk, for messages."""
        names = [f"{layout.tensors[self.tensors[shard]].name}{self.boxes[shard]}" for shard in self.shards_in(chunk)]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")

    @property
    def nbytes_data(self) -> int:
        """Bytes of all chunks."""
        return sum(self.nbytes)

    @classmethod
    def decode(cls, fields: Fields) -> Table:
        """One that says where its chunks lie."""
        chunks = fields.inner("chunks")
        packs, offsets = tuple(chunks.integers("pack", 0, 10**6)), tuple(chunks.integers("offset"))
        table = cls.decode_cuts(fields)
        if {len(packs), len(offsets)} != {len(table.nbytes)}:
            raise fields.fail("columns of chunks differ in length")
        return table.placed(packs, offsets)

    @classmethod
    def decode_cuts(cls, fields: Fields) -> Table:
        """One that does not; it must be `placed`."""
        shards, chunks = fields.inner("shards"), fields.inner("chunks")
        table = cls(
            fields.digest("layout"),
            tuple(shards.integers("tensor")),
            _decode_boxes(shards),
            tuple(shards.integers("chunks")),
            (),
            (),
            tuple(chunks.integers("nbytes", 1)),
        )
        if {len(table.boxes), len(table.num_chunks)} != {len(table.tensors)}:
            raise fields.fail("columns of shards differ in length")
        if len(table.nbytes) != sum(table.num_chunks):
            raise fields.fail("columns of chunks differ in length")
        for before, count in itertools.pairwise((0, *table.num_chunks)):
            if count == 0 and before > 1:
                raise fields.fail(f"a shard shares {before} chunks of the shard before it")
        if table.num_chunks[:1] == (0,):
            raise fields.fail("the first shard has no chunk")
        return table

    def check_packs(self, sizes: Sequence[int], where: str, stored: Sequence[int] | None = None) -> None:
        """Raises FormatError unless the chunks lie in packs of these sizes, and each pack holds all of its chunks.

        `stored`: bytes of each chunk in its pack, where these are not its own.
        """
        stored, left = stored or self.nbytes, [*sizes]
        if len({*self.packs}) == 1 and self.packs[0] < len(sizes):  # as most are, and quick to tell
            size = sizes[self.packs[0]]
            if max(map(operator.add, self.offsets, stored)) <= size and sum(stored) <= size:
                return
        for pack, offset, nbytes in zip(self.packs, self.offsets, stored, strict=True):
            if pack >= len(sizes) or offset + nbytes > sizes[pack]:
                raise FormatError(f"{where}: chunk [{offset}:+{nbytes}] of pack {pack} lies outside of the packs")
            left[pack] -= nbytes
        if min(left, default=0) < 0:  # a few rows could have the same gigabytes read thousands of times
            pack = left.index(min(left))
            raise FormatError(f"{where}: chunks of pack {pack} are larger together than it is")

    def check(self, layout: Layout, where: str) -> None:
        """Raises FormatError unless every shard lies in its tensor and its chunks hold exactly its bytes."""
        if layout.digest != self.layout:
            raise FormatError(f"{where}: table is for layout {self.layout}, not {layout.digest}")
        fitting = layout.digest in self._fitting
        if not fitting and max(self.tensors, default=-1) >= len(layout.tensors):
            raise FormatError(f"{where}: a shard names tensor {max(self.tensors)} of {len(layout.tensors)}")
        for shard in sorted(self._kinds(layout)[0]):
            _check_box(self.boxes[shard], layout.tensors[self.tensors[shard]], where)
        if fitting:
            return
        for shard, count in enumerate(self.num_chunks):
            if count > 1:
                self._check_cuts(shard, layout.tensors[self.tensors[shard]], where)
        self._check_sizes(layout, where)
        self._fitting.add(layout.digest)

    def _check_sizes(self, layout: Layout, where: str) -> None:
        """Shards and chunks follow one another, so they fit when they end together, wherever both do."""
        ends, chunk_ends = [0, *itertools.accumulate(self.sizes(layout))], [0, *itertools.accumulate(self.nbytes)]
        first = 0
        for last, stop in enumerate(itertools.accumulate(self.num_chunks), 1):
            if last < len(self.num_chunks) and self.num_chunks[last] == 0:
                continue  # the next one shares the chunk
            if ends[last] != chunk_ends[stop]:
                raise FormatError(
                    f"{where}: {layout.tensors[self.tensors[first]].name}{self.boxes[first]} and what shares its chunk "
                    f"are {ends[last] - ends[first]} bytes, but the chunk holds {self.nbytes[stop - 1]}"
                )
            first = last

    def _check_cuts(self, shard: int, entry: TensorEntry, where: str) -> None:
        itemsize, box = dtypes.itemsize(entry.dtype), self.boxes[shard]
        chunks = self.chunks(shard)
        sizes = self.nbytes[chunks.start : chunks.stop]
        if sum(sizes) != box.numel * itemsize or any(size % itemsize for size in sizes):
            raise FormatError(
                f"{where}: {entry.name}{box} is {box.numel} elements of {itemsize} bytes, "
                f"but its chunks hold {sum(sizes)}"
            )


def _decode_boxes(shards: Fields) -> tuple[Box, ...]:
    """One object for all boxes that are equal: thousands of small tensors are of few shapes."""
    offsets, shapes = decode_shapes("offset", shards), decode_shapes("shape", shards)
    if len(offsets) != len(shapes):
        raise shards.fail("columns of shards differ in length")
    places = check_spread([*zip(offsets, shapes, strict=True)], shards)
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Box] = {}
    return tuple(known.get(at) or known.setdefault(at, Box(*at)) for at in places)


def _check_box(box: Box, entry: TensorEntry, where: str) -> None:
    if len(box.offset) != len(box.shape) or len(box.shape) != len(entry.shape):
        raise FormatError(
            f"{where}: offset {box.offset} and shape {box.shape} are no box of {entry.name}, "
            f"which has {len(entry.shape)} dims"
        )
    if not box.within(Box.whole(entry.shape)):
        raise FormatError(f"{where}: {entry.name}{box} lies outside of its tensor of shape {entry.shape}")
    if not box.numel:
        raise FormatError(f"{where}: {entry.name}{box} is a shard of no elements, expected one at least")


def shard_nbytes(entry: TensorEntry, box: Box) -> int:
    """Bytes of a box of a tensor."""
    return math.prod(box.shape) * dtypes.itemsize(entry.dtype)
