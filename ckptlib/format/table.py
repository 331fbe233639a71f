"""Tables: where the shards of a rank lie, chunk by chunk. Types and JSON; no I/O."""

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
"""A small number per shard, equal for equal ones."""


def distinct(codes: Codes, bound: int) -> tuple[Codes, Codes, Codes]:
    """Returns the distinct codes, ascending; the position of one example of each; and each code's position among them.

    All codes are below `bound`. If it is small, this does not sort them.
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
    """Properties of a table's shards that depend neither on where their boxes begin nor on where their chunks lie."""

    of_tensor: Mapping[int, Sequence[int]]
    """The shards of each tensor, by its position in the layout's tensors."""
    dtypes: Sequence[str]
    sizes: Sequence[int]
    """Bytes of each shard."""
    skipped: Sequence[int]
    """Bytes of each shard's first chunk that lie before the shard."""


@dataclass(frozen=True)
class Table:
    """Where shards lie; each is cut into chunks that follow one another in its row-major order.

    Small shards share a chunk: a shard with no chunk of its own lies in that of the shard before it, right behind it.

    As long as the layout is the same, every save cuts shards alike, but their chunks lie elsewhere. Offsets count from
    the first byte of a pack; in a slot, from the first byte of its body.
    """

    layout: str
    """Digest of the layout that `tensors` refers to."""
    tensors: tuple[int, ...]
    """Position in the layout's tensors, per shard."""
    boxes: tuple[Box, ...]
    """Box in the tensor's global coordinates, per shard."""
    num_chunks: tuple[int, ...]
    """Number of chunks per shard; 0: it lies in the chunk of the shard before it, which is one chunk."""
    packs: tuple[int, ...]
    """Position in the part's packs, per chunk."""
    offsets: tuple[int, ...]
    """Offset in bytes, per chunk."""
    nbytes: tuple[int, ...]
    """Bytes per chunk."""

    @cached_property
    def encoded(self) -> str:
        """JSON text of how shards are cut and where their chunks lie, as in slots and in parts of version 1."""
        columns: dict[str, Json] = {"pack": list(self.packs), "offset": list(self.offsets)}
        return dump_body({**self._shards(), "chunks": {**columns, "nbytes": list(self.nbytes)}})

    @cached_property
    def cuts(self) -> str:
        """JSON text of how shards are cut, and no more."""
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
        """Digest of `cuts`: equal for tables that cut the shards of equal layouts alike, wherever their chunks lie."""
        return digester(XXH3)(self.cuts.encode())

    def placed(self, packs: Sequence[int], offsets: Sequence[int]) -> Table:
        """Returns a table of the same shards, cut alike, with their chunks elsewhere."""
        table = replace(self, packs=tuple(packs), offsets=tuple(offsets))
        kept = ("cuts", "cuts_digest", "first_chunks", "tensor_codes", "box_codes", "_fitting", "_columns")
        for name in kept:  # these do not depend on where chunks lie, and take a while to make
            if name in self.__dict__:
                table.__dict__[name] = self.__dict__[name]
        return table

    def with_boxes(self, boxes: tuple[Box, ...], codes: Codes) -> Table:
        """Returns a table of the same shards and shapes, elsewhere in their tensors. `codes`: see `box_codes`."""
        table = replace(self, boxes=boxes)
        table.__dict__["box_codes"] = codes
        for name in ("tensor_codes", "first_chunks", "_fitting", "_columns"):  # independent of where boxes begin
            table.__dict__[name] = getattr(self, name)
        return table

    @cached_property
    def tensor_codes(self) -> Codes:
        """`tensors` as an array."""
        return np.array(self.tensors, np.int64)

    @cached_property
    def box_codes(self) -> Codes:
        """A code per box; different boxes have different codes."""
        numbers: dict[int, int] = {}
        return np.array([numbers.setdefault(id(box), len(numbers)) for box in self.boxes], np.int64)

    @cached_property
    def _fitting(self) -> set[str]:
        """Digests of the layouts that shapes and chunks are known to fit. Tables that differ only in where boxes begin
        share the set."""
        return set()

    @cached_property
    def _columns(self) -> dict[str, ShardColumns]:
        """Columns by the layout's digest; shared like `_fitting`."""
        return {}

    def columns(self, layout: Layout) -> ShardColumns:
        """Returns the columns of a table that fits the layout: one object for all tables that cut alike."""
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
        """Position of the chunk in which each shard begins."""
        stops = itertools.accumulate(self.num_chunks)
        return tuple(stop - (count or 1) for stop, count in zip(stops, self.num_chunks, strict=True))

    def chunks(self, shard: int) -> range:
        """Returns the positions of the chunks in which a shard lies."""
        first = self.first_chunks[shard]
        return range(first, first + (self.num_chunks[shard] or 1))

    def is_shared(self, shard: int) -> bool:
        """Returns whether other shards lie in its chunk."""
        return 0 in (self.num_chunks[shard], *self.num_chunks[shard + 1 : shard + 2])

    def begins(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Returns where the first byte of each shard lies, as `offsets` count. `sizes`: bytes of each shard."""
        found, end = [], 0
        for first, count, nbytes in zip(self.first_chunks, self.num_chunks, sizes, strict=True):
            begin = self.offsets[first] if count else end
            found.append(begin)
            end = begin + nbytes
        return tuple(found)

    def sizes(self, layout: Layout) -> list[int]:
        """Returns the bytes of each shard."""
        examples, kinds = self._kinds(layout)
        nbytes = [shard_nbytes(layout.tensors[self.tensors[shard]], self.boxes[shard]) for shard in examples]
        return [*map(nbytes.__getitem__, kinds.tolist())]

    def _kinds(self, layout: Layout) -> tuple[list[int], Codes]:
        """Returns a shard of each kind, and the kind of each shard. Shards of one kind have the same box, of tensors
        with the same shape and dtype.

        Thousands of shards are of few kinds, and equal boxes are one object.
        """
        num_boxes = int(self.box_codes.max(initial=0)) + 1
        codes = layout.alike_codes[self.tensor_codes] * num_boxes + self.box_codes
        _, examples, kinds = distinct(codes, len(layout.tensors) * num_boxes)
        return examples.tolist(), kinds

    def shards_in(self, chunk: int) -> list[int]:
        """Returns the positions of the shards that lie in a chunk, at least in part."""
        first = bisect_left(self.first_chunks, chunk)
        last = bisect_right(self.first_chunks, chunk)
        return [*range(first, last)] or [first - 1]  # a shard that begins in an earlier chunk

    def describe(self, chunk: int, layout: Layout) -> str:
        """Returns the contents of a chunk, for messages."""
        names = [f"{layout.tensors[self.tensors[shard]].name}{self.boxes[shard]}" for shard in self.shards_in(chunk)]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more tensors" if len(names) > 3 else "")

    @property
    def nbytes_data(self) -> int:
        """Bytes of all chunks."""
        return sum(self.nbytes)

    @classmethod
    def decode(cls, fields: Fields) -> Table:
        """Decodes a table that says where its chunks lie."""
        chunks = fields.inner("chunks")
        packs, offsets = tuple(chunks.integers("pack", 0, 10**6)), tuple(chunks.integers("offset"))
        table = cls.decode_cuts(fields)
        if {len(packs), len(offsets)} != {len(table.nbytes)}:
            raise fields.fail("columns of chunks differ in length")
        return table.placed(packs, offsets)

    @classmethod
    def decode_cuts(cls, fields: Fields) -> Table:
        """Decodes a table that does not say where its chunks lie; it must be `placed`."""
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
        """Raises FormatError unless the chunks lie in packs of these sizes, and each pack has room for all of its own.

        `stored`: bytes of each chunk in its pack, if they differ from `nbytes`.
        """
        stored, left = stored or self.nbytes, [*sizes]
        if len({*self.packs}) == 1 and self.packs[0] < len(sizes):  # as in most tables, and quick to check
            size = sizes[self.packs[0]]
            if max(map(operator.add, self.offsets, stored)) <= size and sum(stored) <= size:
                return
        for pack, offset, nbytes in zip(self.packs, self.offsets, stored, strict=True):
            if pack >= len(sizes) or offset + nbytes > sizes[pack]:
                raise FormatError(f"{where}: chunk [{offset}:+{nbytes}] of pack {pack} lies outside of the packs")
            left[pack] -= nbytes
        if min(left, default=0) < 0:  # else a few rows could have the same gigabytes read thousands of times
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
        """Checks that shards and chunks, which both follow one another, end together wherever both end."""
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
    """Returns the boxes; equal ones are one object, for thousands of small tensors have few shapes."""
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
    """Returns the bytes of a box of a tensor."""
    return math.prod(box.shape) * dtypes.itemsize(entry.dtype)
