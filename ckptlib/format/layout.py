"""Layouts: which rank holds which box of which tensor. They store meshes and placements, so that their size does not
grow with the number of ranks.

A layout is written once and shared by all steps and ranks that have it. It also says which rank writes a box that
several ranks hold, so that a reader opens only the parts that it needs. No I/O, no torch.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from typing_extensions import override

from ckptlib.errors import FormatError, UnsupportedState
from ckptlib.format import dtypes, sharding
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.documents import Fields, decode, dump_body, seal
from ckptlib.format.sharding import Placement
from ckptlib.format.tagged_values import brief
from ckptlib.format.values import Json

if TYPE_CHECKING:
    import numpy.typing as npt

H = TypeVar("H", bound=Hashable)

KIND = "layout"
MAX_NDIM = 64
MAX_NUMEL = 2**60

MAX_ALIKE = 100
"""The most different shapes with one hash."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """An n-d array of ranks."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Row-major; as many as the shape says, none twice."""

    @override
    def __hash__(self) -> int:
        """Hashes only a few of the ranks: there may be many thousands, and every tensor asks for the hash."""
        return hash((self.shape, self.ranks[:4], self.ranks[-4:]))

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Returns the coordinate of a rank, or None if it is not in the mesh."""
        if rank not in self.ranks:
            return None
        flat, coordinate = self.ranks.index(rank), []
        for size in reversed(self.shape):
            flat, index = divmod(flat, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def rank(self, coordinate: tuple[int, ...]) -> int:
        """Returns the rank at a coordinate."""
        flat = 0
        for index, size in zip(coordinate, self.shape, strict=True):
            flat = flat * size + index
        return self.ranks[flat]


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor held as a DTensor is: one placement per axis of a mesh."""

    mesh: Mesh
    placements: tuple[Placement, ...]
    writer: tuple[int, ...] | None
    """Coordinate of the ranks that write, on the replicating axes (0 on others); None: the parts say who wrote."""


@dataclass(frozen=True, slots=True)
class OwnPerRank:
    """Every rank has a tensor of its own under this name."""


@dataclass(frozen=True, slots=True)
class ByHand:
    """Every rank holds a box that the user cut; the parts say which."""


Holding = Placed | OwnPerRank | ByHand


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The name, dtype and shape of a tensor."""

    name: str
    dtype: str
    """torch's name, without the module: "bfloat16"."""
    shape: tuple[int, ...]
    """Global shape; of an OwnPerRank tensor, its shape on the ranks that have it in this shape."""

    @property
    def nbytes_global(self) -> int:
        return math.prod(self.shape) * dtypes.itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class TensorEntry(TensorSpec):
    """One tensor of a layout."""

    holding: Holding


@dataclass(frozen=True)
class Layout:
    """The tensors and objects that the ranks with this layout hold."""

    world_size: int
    tensors: tuple[TensorEntry, ...]
    """Sorted by name."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of tied tensors, each with the name under which the data is saved."""
    objects: Mapping[str, Json] = field(default_factory=dict)
    """Description of each object that holds tensors, by path, for rebuilding its state (see
    `ckptlib.state.flatten`)."""

    @cached_property
    def encoded(self) -> bytes:
        """The document."""
        return _encode(self)

    @cached_property
    def digest(self) -> str:
        """Digest of the document, which names it."""
        return digester(XXH3)(self.encoded)

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each name in `tensors`."""
        return {entry.name: i for i, entry in enumerate(self.tensors)}

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Position of the first tensor with the same shape and dtype, per tensor."""
        first: dict[tuple[tuple[int, ...], str], int] = {}
        return tuple(first.setdefault((entry.shape, entry.dtype), i) for i, entry in enumerate(self.tensors))

    @cached_property
    def alike_codes(self) -> npt.NDArray[np.int64]:
        return np.array(self.alike, np.int64)

    @cached_property
    def per_rank(self) -> tuple[int, ...]:
        """Positions of the tensors that are not empty and of which every rank has its own."""
        return tuple(i for i, e in enumerate(self.tensors) if isinstance(e.holding, OwnPerRank) and e.nbytes_global)

    def find(self, name: str) -> TensorEntry | None:
        """Returns the tensor that is saved under this name, or None. Aliases have no tensor of their own."""
        i = self.index.get(name)
        return None if i is None else self.tensors[i]


def ranks_touching(entry: TensorEntry, box: Box, ranks: frozenset[int]) -> Iterator[int]:
    """Yields those of `ranks` whose part may hold data of `box`. All `ranks` share the entry's layout."""
    holding = entry.holding
    if not isinstance(holding, Placed) or holding.writer is None:
        yield from sorted(ranks)
        return
    try:
        writers = _writers(entry.shape, holding, holding.writer, box)
    except UnsupportedState as error:  # no save has such a tensor
        raise FormatError(f"{entry.name}: {error}") from error
    yield from (rank for rank in writers if rank in ranks)


@lru_cache(maxsize=256)  # layers are alike
def _writers(shape: tuple[int, ...], placed: Placed, writer: tuple[int, ...], box: Box) -> tuple[int, ...]:
    """Returns the ranks that write the data of `box`."""
    replicating = sharding.replica_axes(placed.placements)
    found = sharding.coordinates_touching(shape, placed.mesh.shape, placed.placements, box)
    coordinates = (tuple(writer[a] if a in replicating else c for a, c in enumerate(at)) for at in found)
    return tuple(map(placed.mesh.rank, coordinates))


def _encode(layout: Layout) -> bytes:
    meshes: dict[Mesh, int] = {}
    holdings: dict[Holding, int] = {}
    known: dict[int, int] = {}  # by id: holdings are few, and slow to compare
    rows: list[Json] = []
    for entry in layout.tensors:
        index = known.get(id(entry.holding))
        if index is None:
            if isinstance(entry.holding, Placed):
                meshes.setdefault(entry.holding.mesh, len(meshes))
            index = known[id(entry.holding)] = holdings.setdefault(entry.holding, len(holdings))
        rows.append([entry.name, entry.dtype, entry.shape, index])  # type: ignore[list-item]
    body: dict[str, Json] = {
        "world_size": layout.world_size,
        "meshes": [{"shape": list(mesh.shape), "ranks": list(mesh.ranks)} for mesh in meshes],
        "holdings": [_encode_holding(holding, meshes) for holding in holdings],
        "columns": ["name", "dtype", "shape", "holding"],
        "tensors": rows,
        "aliases": dict(layout.aliases),
        "objects": dict(layout.objects),
    }
    return seal(KIND, dump_body(body))


def _encode_holding(holding: Holding, meshes: Mapping[Mesh, int]) -> Json:
    if isinstance(holding, OwnPerRank):
        return {"how": "per-rank"}
    if isinstance(holding, ByHand):
        return {"how": "by-hand"}
    return {
        "how": "placed",
        "mesh": meshes[holding.mesh],
        "placements": [sharding.encode(p) for p in holding.placements],
        "writer": None if holding.writer is None else list(holding.writer),
    }


def decode_layout(data: bytes, where: str) -> Layout:
    """Returns the layout in a document. Raises what `documents.decode` raises."""
    fields = decode(KIND, data, where)
    world_size = fields.integer("world_size", 1, 10**6)
    meshes = [_decode_mesh(Fields(m, f"{where}: mesh {i}"), world_size) for i, m in enumerate(fields.items("meshes"))]
    holdings = [
        _decode_holding(Fields(h, f"{where}: holding {i}"), meshes) for i, h in enumerate(fields.items("holdings"))
    ]
    tensors = _decode_entries(fields.items("tensors"), holdings, fields)
    names = [entry.name for entry in tensors]
    if any(map(operator.ge, names, names[1:])):
        raise fields.fail("tensors are not sorted by name, or one stands twice")
    aliases = fields.mapping("aliases")
    known = set(names)
    if not all(isinstance(v, str) and v in known and k not in known for k, v in aliases.items()):
        raise fields.fail("an alias names no tensor, or shadows one")
    layout = Layout(world_size, tensors, aliases, fields.tree("objects"))  # type: ignore[arg-type]
    vars(layout)["encoded"] = data  # may have fields that this version does not know: the digest covers them, too
    return layout


def _decode_mesh(fields: Fields, world_size: int) -> Mesh:
    shape = tuple(fields.integers("shape", 1))
    ranks = tuple(fields.integers("ranks", 0, world_size - 1))
    if len(shape) > MAX_NDIM or math.prod(shape) != len(ranks) or len(set(ranks)) != len(ranks):
        raise fields.fail(f"shape {brief(shape)} does not fit its {len(ranks)} ranks, or a rank stands twice")
    return Mesh(shape, ranks)


def _decode_holding(fields: Fields, meshes: list[Mesh]) -> Holding:
    how = fields.text("how")
    if how == "per-rank":
        return OwnPerRank()
    if how == "by-hand":
        return ByHand()
    if how != "placed":
        raise fields.fail(f"unknown way of holding a tensor: {how!r}; update ckptlib")
    mesh = meshes[fields.integer("mesh", 0, len(meshes) - 1)]
    placements = tuple(sharding.decode(text) for text in fields.texts("placements"))
    writer = None if fields.raw("writer") is None else tuple(fields.integers("writer"))
    if len(placements) != len(mesh.shape):
        raise fields.fail(f"{len(placements)} placements for a mesh with {len(mesh.shape)} axes")
    if writer is not None and (
        len(writer) != len(mesh.shape) or any(w >= n for w, n in zip(writer, mesh.shape, strict=True))
    ):
        raise fields.fail(f"writer {brief(writer)} lies outside a mesh of shape {mesh.shape}")
    return Placed(mesh, placements, writer)


def _decode_entries(rows: list[Json], holdings: list[Holding], fields: Fields) -> tuple[TensorEntry, ...]:
    """Checks the rows column by column: there may be a hundred thousand."""
    if not rows:
        return ()
    for row in rows:
        if not isinstance(row, list) or len(row) != 4:
            raise fields.fail(f"not a row of tensors: {brief(row)}")
    names, words, sizes, indices = zip(*rows, strict=True)
    for what, column, kind in (("names", names, str), ("dtypes", words, str), ("holdings", indices, int)):
        if {*map(type, column)} != {kind}:
            raise fields.fail(f"the {what} of tensors are not all of type {kind.__name__}")
    if min(indices) < 0 or max(indices) >= len(holdings):
        raise fields.fail(f"a tensor has a holding that is none of {len(holdings)}")
    for word in {*words}:
        dtypes.itemsize(word)
    shapes = _decode_shapes(list(sizes), fields)
    for index, ndim in {*zip(indices, map(len, shapes), strict=True)}:
        holding = holdings[index]
        if isinstance(holding, Placed):
            _check_dims(holding.placements, ndim, fields)
    held = (holdings[index] for index in indices)
    return tuple(map(TensorEntry, names, words, shapes, held))


def _check_dims(placements: tuple[Placement, ...], ndim: int, fields: Fields) -> None:
    for placement in placements:
        if not isinstance(placement, sharding.Replicate) and not 0 <= placement.dim < ndim:
            raise fields.fail(f"placement {sharding.encode(placement)} of a tensor with {ndim} dims")


def decode_shapes(name: str, fields: Fields) -> list[tuple[int, ...]]:
    """Returns a column of shapes or offsets: sizes >= 0, of bounded number and product. Raises FormatError."""
    return _decode_shapes(fields.items(name), fields)


def _decode_shapes(values: list[Json], fields: Fields) -> list[tuple[int, ...]]:
    if {*map(type, values)} - {list}:
        raise fields.fail("a shape that is no list")
    shapes: list[tuple[int, ...]] = list(map(tuple, values))  # type: ignore[arg-type]
    if {*map(type, itertools.chain.from_iterable(shapes))} - {int}:
        raise fields.fail("a shape that is not made of integers")
    sizes = [*itertools.chain.from_iterable(shapes)]
    if max(map(len, shapes), default=0) > MAX_NDIM or min(sizes, default=0) < 0 or max(sizes, default=0) > MAX_NUMEL:
        raise fields.fail(f"a shape of more than {MAX_NDIM} dims, or with sizes that are none")
    if max(map(math.prod, shapes), default=0) > MAX_NUMEL:
        raise fields.fail(f"a shape of absurd size: {brief(max(shapes, key=math.prod))}")
    return check_spread(shapes, fields)


def check_spread(items: list[H], fields: Fields) -> list[H]:
    """Returns the items. Raises FormatError if many different ones share a hash, which makes every dict slow."""
    seen = dict(zip(map(hash, items), items, strict=True))
    if sum(map(operator.ne, map(seen.__getitem__, map(hash, items)), items)) > MAX_ALIKE:
        raise fields.fail(f"more than {MAX_ALIKE} different shapes have one hash: they were made to")
    return items
