"""Parts: what one rank puts for a save, or its record that it failed. Types and JSON; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ckptlib.errors import CorruptData, FormatError
from ckptlib.format import table_text
from ckptlib.format.check import Check, decode_check
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.documents import Fields, as_written, body_of, decode, dump_body, encode, seal
from ckptlib.format.keys import MAX_RANK, PackSet, PartName, SaveId, pack_set, parse_pack_set, parse_save
from ckptlib.format.places import Coding, Places, decode_places, encode_places
from ckptlib.format.table import Table
from ckptlib.format.tagged_values import brief
from ckptlib.format.values import Json, loads

MAX_ERROR = 2000
"""The longest error of a failed rank, in characters."""


@dataclass(frozen=True, slots=True)
class Pack:
    """One pack of a part."""

    key: str
    nbytes: int
    """Bytes of the whole object."""
    created: float
    """When the snapshot it was made of was taken; seconds since the epoch, by the rank's clock."""


@dataclass(frozen=True)
class Part:
    """One rank's share of a save: its chunks, wherever they lie, and its non-tensor state."""

    save: SaveId
    rank: int
    world_size: int
    attempt: str
    table: Table
    packs: tuple[Pack, ...]
    """Includes packs of other saves that hold chunks which have not changed since."""
    algorithm: str
    digests: tuple[str, ...]
    """Digest per chunk of the table, of the bytes that a load gives back."""
    values: Mapping[str, Json]
    """Non-tensor state by path, as `ckptlib.format.values` encodes it."""
    metrics: Mapping[str, Json]
    created: float
    """When the snapshot was taken; seconds since the epoch, by the rank's clock."""
    check: Check | None = None
    """See `PartName.check`."""
    codings: Mapping[int, Coding] = field(default_factory=dict)
    """Codings of the chunks that are not stored as they are, by chunk."""
    exempt: bool = False
    """Whether the step is to stay for good; only rank 0's counts."""
    account: Mapping[str, Json] = field(default_factory=dict)
    """How the start of the job had spent its time by then; see `format.account`. Only rank 0's counts."""

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """Bytes in the pack, per chunk of the table."""
        return tuple(self.places.stored(self.table.nbytes))

    @property
    def places(self) -> Places:
        """Where its chunks lie, and how they are coded."""
        return Places(self.table.packs, self.table.offsets, self.codings)

    @property
    def uses(self) -> tuple[PackSet, ...]:
        """The sets of packs of other saves in which its chunks lie; ascending."""
        sets = {pack_set(pack.key) for pack in self.packs}
        return tuple(sorted(found for found in sets if found is not None and found.save != self.save))

    @property
    def nbytes_put(self) -> int:
        """Bytes of its own packs."""
        own = self.save.packs_prefix
        return sum(pack.nbytes for pack in self.packs if pack.key.startswith(own))

    @property
    def head(self) -> PartHead:
        return PartHead(self.created, self.metrics, self.uses, self.exempt, self.account)

    def encode(self) -> tuple[PartName, bytes]:
        """Returns the name to put the document under, and the document."""
        uses = self.uses
        body: dict[str, Json] = {
            "save": str(self.save),
            "rank": self.rank,
            "world_size": self.world_size,
            "attempt": self.attempt,
            "created": self.created,
            "uses": [*map(str, uses)],
            "metrics": dict(self.metrics),
            "values": dict(self.values),
            "packs": [[pack.key, pack.nbytes, pack.created] for pack in self.packs],
            "algorithm": self.algorithm,
            "digests": "".join(self.digests),
            **encode_places(self.places, self.table.nbytes),
            **({"exempt": True} if self.exempt else {}),
            **({"account": dict(self.account)} if self.account else {}),
        }
        head = dump_body(body if self.check is None else {**body, "check": str(self.check)})
        document = seal("part", f'{head[:-1]},"table":{self.table.cuts}}}')
        table, digest = self.table.cuts_digest, digester(XXH3)(document)
        name = PartName(
            self.save, self.rank, self.attempt, table, digest, self.check, uses_digest(uses), self.nbytes_put
        )
        return name, document

    @classmethod
    def decode(cls, name: PartName, data: bytes) -> Part:
        """Decodes the part of this name. Raises what `documents.decode` raises, also if it does not match its name."""
        data = checked(name, data)
        fields, table = _decode_body(body_of("part", data, name.key), name.key)
        placed = "places" not in fields  # version 1
        if table is None:
            table = Table.decode(fields.inner("table")) if placed else Table.decode_cuts(fields.inner("table"))
        places = Places(table.packs, table.offsets, {}) if placed else decode_places(fields, table.nbytes)
        created = fields.number("created")
        part = cls(
            parse_save(fields.text("save")),
            fields.integer("rank", 0, MAX_RANK),
            fields.integer("world_size", 1, MAX_RANK + 1),
            fields.text("attempt", "[0-9a-f]{8}"),
            table.placed(places.packs, places.offsets),
            tuple(_decode_pack(row, created, fields) for row in fields.items("packs")),
            fields.algorithm("algorithm"),
            tuple(fields.digests(len(table.nbytes))),
            fields.tree("values"),
            fields.tree("metrics"),
            created,
            decode_check(fields),
            places.codings,
            fields.flag("exempt"),
            _decode_account(fields),
        )
        told = part.save, part.rank, part.attempt, part.check
        if told != (name.save, name.rank, name.attempt, name.check):
            raise fields.fail("content and name tell of different parts")
        # The table's text comes last if ckptlib wrote it; writing it again takes longer than reading it.
        text = data[data.rfind(b'"table":') + len(b'"table":') : -len(b"}}\n")]
        if digester(XXH3)(text) != name.table and name.table != (table.digest if placed else table.cuts_digest):
            raise fields.fail("content and name tell of different parts")
        part._check_uses(name, fields)
        part._check_places(name.key)
        return part

    def _check_uses(self, name: PartName, fields: Fields) -> None:
        """Checks that the packs a committer takes from the name are those that a load takes from the part."""
        if name.uses is None:
            if self.uses:
                raise fields.fail(f"its name does not tell of chunks in packs of {self.uses[0]}")
        elif (name.uses, name.nbytes) != (uses_digest(self.uses), self.nbytes_put) or self.uses != _uses(name, fields):
            raise fields.fail("name, uses and packs tell of different packs")

    def _check_places(self, where: str) -> None:
        """Raises FormatError unless chunks and their bases lie in the packs."""
        sizes = [pack.nbytes for pack in self.packs]
        self.table.check_packs(sizes, where, self.stored)
        for coding in self.codings.values():
            base = coding.base
            if base is not None and (base.pack >= len(sizes) or base.offset + base.stored > sizes[base.pack]):
                raise FormatError(
                    f"{where}: base [{base.offset}:+{base.stored}] of pack {base.pack} lies outside of it"
                )


_TABLE = b',"table":'


def _decode_body(body: bytes, where: str) -> tuple[Fields, Table | None]:
    """Returns the fields of a part. If the table is the last field and its text is as ckptlib writes it, returns the
    table apart from the fields; otherwise None.

    The text before the table is an object by itself only if all of its strings and lists end before it.
    """
    cut = body.rfind(_TABLE)
    table = table_text.decode_cuts(body[cut + len(_TABLE) : -1]) if cut > 1 and body[-1:] == b"}" else None
    if table is not None:
        try:
            fields = Fields(loads(body[:cut] + b"}"), where)
        except FormatError:
            table = None  # decoding the whole body below says what is wrong
        else:
            if "table" not in fields and "places" in fields:
                return fields, table
    return Fields(loads(body), where), None


def uses_digest(uses: Iterable[PackSet]) -> str:
    """Returns the digest in the name of a part of these sets of packs, which are in ascending order."""
    return digester(XXH3)(" ".join(map(str, uses)).encode())[:16]


@dataclass(frozen=True, slots=True)
class PartHead:
    """The fields that a manifest takes from a part; not its table."""

    created: float
    metrics: Mapping[str, Json]
    uses: tuple[PackSet, ...]
    exempt: bool = False
    account: Mapping[str, Json] = field(default_factory=dict)

    @classmethod
    def decode(cls, name: PartName, data: bytes) -> PartHead:
        """Decodes the head of the part of this name. Raises what `Part.decode` raises."""
        fields = decode("part", checked(name, data), name.key)
        uses = _uses(name, fields)
        if name.uses not in (None, uses_digest(uses)):
            raise fields.fail("name and uses tell of different packs")
        account = _decode_account(fields)
        return cls(fields.number("created"), fields.tree("metrics"), uses, fields.flag("exempt"), account)


def _decode_account(fields: Fields) -> dict[str, Json]:
    return fields.tree("account") if "account" in fields else {}


def _uses(name: PartName, fields: Fields) -> tuple[PackSet, ...]:
    """Returns the sets of packs that the part names; none for a name of version 1, which promises none."""
    return () if name.uses is None else tuple(map(parse_pack_set, fields.texts("uses")))


def checked(name: PartName, data: bytes) -> bytes:
    """Returns the document as written. Raises CorruptData, naming the part, if the digest in its name differs."""
    found = digester(XXH3)(data)
    if found != name.digest:
        data = as_written(data, name.key)
        found = digester(XXH3)(data)
    if found != name.digest:
        raise CorruptData(f"{name.key} does not match the digest in its name: got {found}; it was cut or altered")
    return data


def _decode_pack(row: Json, created: float, fields: Fields) -> Pack:
    """Reads a row of packs. `created` is the part's, for rows of version 1, which have none."""
    match row:
        case [str(key), int(nbytes), *more] if (
            pack_set(key) is not None and type(nbytes) is int and 0 <= nbytes <= 2**62
        ):
            match more:
                case []:
                    return Pack(key, nbytes, created)
                case [float() | int() as when] if type(when) is not bool and abs(when) <= 2**62:
                    return Pack(key, nbytes, float(when))
    raise fields.fail(f"not a pack: {brief(row)}")


@dataclass(frozen=True, slots=True)
class FailedPart:
    """A rank's record that its share of a save will not come."""

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
