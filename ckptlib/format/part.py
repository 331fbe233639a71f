"""Parts: what one rank puts for a save, or its word that nothing will come. Types and JSON; no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptlib.errors import CorruptData
from ckptlib.format.check import Check, decode_check
from ckptlib.format.digests import HEX_WIDTH, XXH3, digester
from ckptlib.format.documents import Fields, as_written, decode, dump_body, encode, seal
from ckptlib.format.keys import MAX_RANK, PartName, SaveId, pack_save, parse_save
from ckptlib.format.table import Table
from ckptlib.format.tagged_values import brief
from ckptlib.format.values import Json

MAX_ERROR = 2000
"""Characters of what a rank says of its failure."""


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
    """Non-tensor state by path, as `ckptlib.format.values` encodes it."""
    metrics: Mapping[str, Json]
    created: float
    """When the snapshot was taken; seconds since the epoch, by the rank's clock."""
    check: Check | None = None
    """See `PartName.check`."""

    def encode(self) -> tuple[PartName, bytes]:
        """The document and the name it is put under."""
        body: dict[str, Json] = {
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
        head = dump_body(body if self.check is None else {**body, "check": str(self.check)})
        document = seal("part", f'{head[:-1]},"table":{self.table.encoded}}}')
        digest = digester(XXH3)(document)
        return PartName(self.save, self.rank, self.attempt, self.table.digest, digest, self.check), document

    @classmethod
    def decode(cls, name: PartName, data: bytes) -> Part:
        """The part of this name. Raises as `documents.decode` does, also when it is not what its name says."""
        data = checked(name, data)
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
            fields.tree("values"),
            fields.tree("metrics"),
            fields.number("created"),
            decode_check(fields),
        )
        told = part.save, part.rank, part.attempt, part.check
        if told != (name.save, name.rank, name.attempt, name.check):
            raise fields.fail("content and name tell of different parts")
        # The table's text comes last wherever ckptlib wrote it; to write it again takes longer than to read it.
        text = data[data.rfind(b'"table":') + len(b'"table":') : -len(b"}}\n")]
        if digester(XXH3)(text) != name.table and table.digest != name.table:
            raise fields.fail("content and name tell of different parts")
        if len(digests) != HEX_WIDTH * len(table.nbytes):
            raise fields.fail(f"{len(digests)} hex digits of digests for {len(table.nbytes)} chunks")
        table.check_packs([pack.nbytes for pack in part.packs], name.key)
        return part


@dataclass(frozen=True, slots=True)
class PartHead:
    """What a manifest takes from a part, without its table."""

    created: float
    metrics: Mapping[str, Json]

    @classmethod
    def decode(cls, name: PartName, data: bytes) -> PartHead:
        """Of the part of this name. Raises as `Part.decode` does."""
        fields = decode("part", checked(name, data), name.key)
        return cls(fields.number("created"), fields.tree("metrics"))


def checked(name: PartName, data: bytes) -> bytes:
    """The document, as it was written. Raises a CorruptData that names the part when its name promises other bytes."""
    data = as_written(data, name.key)
    found = digester(XXH3)(data)
    if found != name.digest:
        raise CorruptData(f"{name.key} does not match the digest in its name: got {found}; it was cut or altered")
    return data


def _decode_pack(row: Json, fields: Fields) -> Pack:
    match row:
        case [str(key), int(nbytes)] if pack_save(key) is not None and 0 <= nbytes <= 2**62:
            return Pack(key, nbytes)
        case _:
            raise fields.fail(f"not a pack: {brief(row)}")


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
        fields = decode("failure", checked(name, data), name.key)
        return cls(name.save, name.rank, name.attempt, fields.text("error")[:MAX_ERROR])
