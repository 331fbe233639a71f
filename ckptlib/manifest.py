"""The small documents of a root: itself, generations, parts, manifests and trash records. Types and JSON; no I/O.

A manifest is derived from parts alone, so whoever commits a step writes the same bytes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ckptlib import dtypes
from ckptlib.box import Box
from ckptlib.digests import ALGORITHMS, HEX_WIDTH, XXH3, digester
from ckptlib.documents import Fields, decode, dump_body, encode, seal
from ckptlib.errors import FormatError
from ckptlib.keys import (
    MAX_GENERATION,
    MAX_RANK,
    STEPS,
    GenerationId,
    PartName,
    SaveId,
    pack_save,
    parse_part_key,
    parse_save,
)
from ckptlib.layout import Layout, TensorEntry, decode_shapes
from ckptlib.values import Json


@dataclass(frozen=True, slots=True)
class Root:
    """`ckptlib.json`: what all writers of a root agree upon. Written once."""

    id: str
    """32 random hex digits."""
    algorithm: str
    """Of the digests of chunks."""
    save_deadline_s: float
    """A save that is not committed this many seconds after it began never will be."""

    def encode(self) -> bytes:
        return encode("root", {"id": self.id, "algorithm": self.algorithm, "save_deadline_s": self.save_deadline_s})

    @classmethod
    def decode(cls, data: bytes, where: str) -> Root:
        fields = decode("root", data, where)
        algorithm = fields.text("algorithm")
        if algorithm not in ALGORITHMS:
            raise fields.fail(f"digest algorithm {algorithm!r} is not one of {', '.join(ALGORITHMS)}; update ckptlib")
        return cls(fields.digest("id"), algorithm, fields.number("save_deadline_s"))


@dataclass(frozen=True, slots=True)
class Generation:
    """One incarnation of the job: where it came from and what ran it."""

    id: GenerationId
    world_size: int
    resumed_from: SaveId | None
    """The step it continues; None: it began anew."""
    created: float
    """Seconds since the epoch, by rank 0's clock."""
    versions: Mapping[str, str]
    """Of python, torch, ckptlib."""
    host: str
    """Where rank 0 ran."""
    tags: Mapping[str, str] = field(default_factory=dict)
    domains: tuple[str, ...] = ()
    """With snapshots in memory, the failure domain of each rank; none without."""
    copies: int = 0
    """Replicas of each rank's snapshots, in other domains than its own."""

    def encode(self) -> bytes:
        body: dict[str, Json] = {
            "generation": self.id.number,
            "nonce": self.id.nonce,
            "world_size": self.world_size,
            "resumed_from": None if self.resumed_from is None else str(self.resumed_from),
            "created": self.created,
            "host": self.host,
            "versions": dict(self.versions),
            "tags": dict(self.tags),
        }
        if self.domains:
            body["peers"] = {"copies": self.copies, "domains": list(self.domains)}
        return encode("generation", body)

    @classmethod
    def decode(cls, data: bytes, where: str) -> Generation:
        fields = decode("generation", data, where)
        resumed = None if fields.raw("resumed_from") is None else parse_save(fields.text("resumed_from"))
        peers = fields.inner("peers") if "peers" in fields else None
        return cls(
            GenerationId(fields.integer("generation", 0, MAX_GENERATION), fields.text("nonce", "[0-9a-f]{8}")),
            fields.integer("world_size", 1, MAX_RANK + 1),
            resumed,
            fields.number("created"),
            {k: str(v) for k, v in fields.mapping("versions").items()},
            fields.text("host"),
            {k: str(v) for k, v in fields.mapping("tags").items()},
            () if peers is None else tuple(peers.texts("domains")),
            0 if peers is None else peers.integer("copies"),
        )


@dataclass(frozen=True)
class Table:
    """What lies where: shards, each cut into chunks that follow one another in its row-major order.

    Small shards share a chunk: one with no chunk of its own lies in that of the shard before it, right behind it.

    Without the digests of the data, so that it is the same at every save as long as the layout is. Offsets count from
    the first byte of a pack; in a slot, from the first byte of its body.
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
        """JSON text."""
        return dump_body(
            {
                "layout": self.layout,
                "shards": {
                    "tensor": list(self.tensors),
                    "offset": [box.offset for box in self.boxes],  # type: ignore[misc]
                    "shape": [box.shape for box in self.boxes],  # type: ignore[misc]
                    "chunks": list(self.num_chunks),
                },
                "chunks": {"pack": list(self.packs), "offset": list(self.offsets), "nbytes": list(self.nbytes)},
            }
        )

    @cached_property
    def digest(self) -> str:
        return digester(XXH3)(self.encoded.encode())

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
        kinds = self._kinds(layout)
        nbytes = {
            kind: shard_nbytes(layout.tensors[self.tensors[shard]], self.boxes[shard])
            for kind, shard in {kind: shard for shard, kind in enumerate(kinds)}.items()
        }
        return [*map(nbytes.__getitem__, kinds)]

    def _kinds(self, layout: Layout) -> list[tuple[int, int]]:
        """Per shard: equal for those with the same box of tensors of the same shape and dtype.

        Thousands of shards are of few kinds, and equal boxes are one object.
        """
        return [*zip(map(layout.alike.__getitem__, self.tensors), map(id, self.boxes), strict=True)]

    def shards_in(self, chunk: int) -> list[int]:
        """Positions of the shards that lie in a chunk, at least in part."""
        return [shard for shard in range(len(self.tensors)) if chunk in self.chunks(shard)]

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
        shards, chunks = fields.inner("shards"), fields.inner("chunks")
        table = cls(
            fields.digest("layout"),
            tuple(shards.integers("tensor")),
            _decode_boxes(shards),
            tuple(shards.integers("chunks")),
            tuple(chunks.integers("pack", 0, 10**6)),
            tuple(chunks.integers("offset")),
            tuple(chunks.integers("nbytes", 1)),
        )
        if {len(table.boxes), len(table.num_chunks)} != {len(table.tensors)}:
            raise fields.fail("columns of shards differ in length")
        if {len(table.packs), len(table.offsets), len(table.nbytes)} != {sum(table.num_chunks)}:
            raise fields.fail("columns of chunks differ in length")
        for before, count in itertools.pairwise((0, *table.num_chunks)):
            if count == 0 and before > 1:
                raise fields.fail(f"a shard shares {before} chunks of the shard before it")
        if table.num_chunks[:1] == (0,):
            raise fields.fail("the first shard has no chunk")
        return table

    def check(self, layout: Layout, where: str) -> None:
        """Raises FormatError unless every shard lies in its tensor and its chunks hold exactly its bytes."""
        if layout.digest != self.layout:
            raise FormatError(f"{where}: table is for layout {self.layout}, not {layout.digest}")
        if max(self.tensors, default=0) >= max(len(layout.tensors), 1):
            raise FormatError(f"{where}: a shard names tensor {max(self.tensors)} of {len(layout.tensors)}")
        for shard in {kind: shard for shard, kind in enumerate(self._kinds(layout))}.values():
            _check_box(self.boxes[shard], layout.tensors[self.tensors[shard]], where)
        for shard, count in enumerate(self.num_chunks):
            if count > 1:
                self._check_cuts(shard, layout.tensors[self.tensors[shard]], where)
        self._check_sizes(layout, where)

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
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], Box] = {}
    return tuple(known.get(at) or known.setdefault(at, Box(*at)) for at in zip(offsets, shapes, strict=True))


def _check_box(box: Box, entry: TensorEntry, where: str) -> None:
    if len(box.offset) != len(box.shape) or len(box.shape) != len(entry.shape):
        raise FormatError(
            f"{where}: offset {box.offset} and shape {box.shape} are no box of {entry.name}, "
            f"which has {len(entry.shape)} dims"
        )
    if not box.within(Box.whole(entry.shape)):
        raise FormatError(f"{where}: {entry.name}{box} lies outside of its tensor of shape {entry.shape}")


@dataclass(frozen=True, slots=True)
class Pack:
    """One pack of a part."""

    key: str
    nbytes: int
    """Of the whole object."""


@dataclass(frozen=True)
class Part:
    """One rank's share of a save: its chunks and its non-tensor state."""

    save: SaveId
    rank: int
    world_size: int
    attempt: str
    table: Table
    packs: tuple[Pack, ...]
    algorithm: str
    digests: tuple[str, ...]
    """Per chunk of the table."""
    values: Mapping[str, Json]
    """Non-tensor state by path, as `ckptlib.values` encodes it."""
    metrics: Mapping[str, Json]
    created: float
    """When the snapshot was taken; seconds since the epoch, by the rank's clock."""

    def encode(self) -> tuple[PartName, bytes]:
        """The document and the name it is put under."""
        head = dump_body(
            {
                "save": str(self.save),
                "rank": self.rank,
                "world_size": self.world_size,
                "attempt": self.attempt,
                "created": self.created,
                "metrics": dict(self.metrics),
                "values": dict(self.values),
                "packs": [[pack.key, pack.nbytes] for pack in self.packs],
                "algorithm": self.algorithm,
                "digests": "".join(self.digests),
            }
        )
        document = seal("part", f'{head[:-1]},"table":{self.table.encoded}}}')
        digest = digester(XXH3)(document)
        return PartName(self.save, self.rank, self.attempt, self.table.digest, digest), document

    @classmethod
    def decode(cls, name: PartName, data: bytes) -> Part:
        """The part of this name. Raises as `documents.decode` does, also when it is not what its name says."""
        check_part_digest(name, data)
        fields = decode("part", data, name.key)
        table = Table.decode(fields.inner("table"))
        digests = fields.text("digests", "[0-9a-f]*")
        part = cls(
            parse_save(fields.text("save")),
            fields.integer("rank", 0, MAX_RANK),
            fields.integer("world_size", 1, MAX_RANK + 1),
            fields.text("attempt", "[0-9a-f]{8}"),
            table,
            tuple(_decode_pack(row, fields) for row in fields.items("packs")),
            fields.text("algorithm"),
            tuple(digests[i : i + HEX_WIDTH] for i in range(0, len(digests), HEX_WIDTH)),
            fields.mapping("values"),
            fields.mapping("metrics"),
            fields.number("created"),
        )
        if (part.save, part.rank, part.attempt) != (name.save, name.rank, name.attempt):
            raise fields.fail("content and name tell of different parts")
        # The table's text comes last wherever ckptlib wrote it; to write it again takes longer than to read it.
        text = data[data.rfind(b'"table":') + len(b'"table":') : -len(b"}}\n")]
        if digester(XXH3)(text) != name.table and table.digest != name.table:
            raise fields.fail("content and name tell of different parts")
        if len(digests) != HEX_WIDTH * len(table.nbytes):
            raise fields.fail(f"{len(digests)} hex digits of digests for {len(table.nbytes)} chunks")
        for pack, offset, nbytes in zip(table.packs, table.offsets, table.nbytes, strict=True):
            if pack >= len(part.packs) or offset + nbytes > part.packs[pack].nbytes:
                raise fields.fail(f"chunk [{offset}:+{nbytes}] of pack {pack} lies outside of the packs")
        return part


@dataclass(frozen=True, slots=True)
class PartHead:
    """What a manifest takes from a part, without its table."""

    created: float
    metrics: Mapping[str, Json]

    @classmethod
    def decode(cls, name: PartName, data: bytes) -> PartHead:
        """Of the part of this name. Raises as `Part.decode` does."""
        check_part_digest(name, data)
        fields = decode("part", data, name.key)
        return cls(fields.number("created"), fields.mapping("metrics"))


def check_part_digest(name: PartName, data: bytes) -> None:
    """Raises a CorruptData that names the part when its bytes are not those its name promises."""
    from ckptlib.errors import CorruptData

    found = digester(XXH3)(data)
    if found != name.digest:
        raise CorruptData(f"{name.key} does not match the digest in its name: got {found}; it was cut or altered")


def _decode_pack(row: Json, fields: Fields) -> Pack:
    match row:
        case [str(key), int(nbytes)] if pack_save(key) is not None and 0 <= nbytes <= 2**62:
            return Pack(key, nbytes)
        case _:
            raise fields.fail(f"not a pack: {str(row)[:120]}")


@dataclass(frozen=True, slots=True)
class FailedPart:
    """A rank's word that its share of a save will not come."""

    save: SaveId
    rank: int
    attempt: str
    error: str

    def encode(self) -> tuple[PartName, bytes]:
        document = encode("failure", {"save": str(self.save), "rank": self.rank, "error": self.error})
        return PartName(self.save, self.rank, self.attempt, None, digester(XXH3)(document)), document

    @classmethod
    def decode(cls, name: PartName, data: bytes) -> FailedPart:
        check_part_digest(name, data)
        fields = decode("failure", data, name.key)
        return cls(name.save, name.rank, name.attempt, fields.text("error"))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The commit point: a step exists when, and only when, this does."""

    save: SaveId
    world_size: int
    parts: tuple[PartName, ...]
    """By rank."""
    layouts: Mapping[str, tuple[int, ...]]
    """Digest of each layout, and the ranks that have it; each rank once."""
    nbytes: int
    """Bytes of all packs."""
    created: float
    """When rank 0's snapshot was taken; seconds since the epoch."""
    metrics: Mapping[str, Json]
    """Rank 0's."""

    def encode(self) -> bytes:
        body: dict[str, Json] = {
            "save": str(self.save),
            "step": self.save.step,
            "world_size": self.world_size,
            "created": self.created,
            "nbytes": self.nbytes,
            "metrics": dict(self.metrics),
            "layouts": {digest: _to_runs(ranks) for digest, ranks in self.layouts.items()},
            "parts": [name.key for name in self.parts],
        }
        return encode("manifest", body)

    @classmethod
    def decode(cls, save: SaveId, data: bytes, where: str | None = None) -> Manifest:
        where = where or save.manifest_key
        fields = decode("manifest", data, where)
        world_size = fields.integer("world_size", 1, MAX_RANK + 1)
        if parse_save(fields.text("save")) != save:
            raise fields.fail("content and name tell of different saves")
        parts = tuple(_decode_part_key(key, save, fields) for key in fields.texts("parts"))
        if [part.rank for part in parts] != list(range(world_size)):
            raise fields.fail(f"does not name one part for each of {world_size} ranks")
        layouts = {digest: _from_runs(runs, fields) for digest, runs in fields.mapping("layouts").items()}
        if not all(re.fullmatch("[0-9a-f]{32}", digest) for digest in layouts):
            raise fields.fail("layouts are not named by their digests")
        if sorted(rank for ranks in layouts.values() for rank in ranks) != list(range(world_size)):
            raise fields.fail(f"does not name one layout for each of {world_size} ranks")
        return cls(
            save,
            world_size,
            parts,
            layouts,
            fields.integer("nbytes"),
            fields.number("created"),
            fields.mapping("metrics"),
        )


def _decode_part_key(key: str, save: SaveId, fields: Fields) -> PartName:
    name = parse_part_key(key)
    if name is None or name.save != save or not name.ok:
        raise fields.fail(f"not a part of this save: {key[:120]!r}")
    return name


def _to_runs(ranks: tuple[int, ...]) -> Json:
    """Ascending ranks as [first, last] pairs."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs  # type: ignore[return-value]


def _from_runs(value: Json, fields: Fields) -> tuple[int, ...]:
    ranks: list[int] = []
    for run in value if isinstance(value, list) else [value]:
        match run:
            case [int(first), int(last)] if (ranks[-1] if ranks else -1) < first <= last <= MAX_RANK:
                ranks.extend(range(first, last + 1))
            case _:
                raise fields.fail(f"not runs of ranks: {str(value)[:80]}")
    return tuple(ranks)


@dataclass(frozen=True, slots=True)
class TrashRecord:
    """A step that retention dropped; its objects go when this record is older than the grace period."""

    save: SaveId
    reason: str

    def encode(self) -> bytes:
        return encode("trash", {"save": str(self.save), "manifest": f"{STEPS}{self.save}.json", "reason": self.reason})


def shard_nbytes(entry: TensorEntry, box: Box) -> int:
    """Bytes of a box of a tensor."""
    return math.prod(box.shape) * dtypes.itemsize(entry.dtype)
