"""The header of a slot: its first page, a sealed document that says what the slot holds, and whether it is whole.

It is written in place, over the one before it; a torn header does not match the digest that seals it. No files, no
locks, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptlib.format.check import Check, decode_check
from ckptlib.format.documents import decode, encode
from ckptlib.format.keys import MAX_RANK, SaveId, parse_save
from ckptlib.format.values import Json
from ckptlib.pages import PAGE_BYTES


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The fields of a slot's header."""

    root_id: str
    save: SaveId
    """The snapshot it holds, or is about to hold."""
    rank: int
    world_size: int
    number: int
    """Counts the snapshots of a generation, alike on all ranks: two of one step are not to be mixed."""
    sequence: int
    """Odd while the content is written, even when it is whole; never goes back."""
    body_nbytes: int
    documents: Mapping[str, tuple[int, int, str]]
    """Offset in the file, bytes and digest of each document, by name."""
    check: Check | None = None
    """Its rank's check of replicated shards. None while it is written, and in older slots."""

    @property
    def ready(self) -> bool:
        return self.sequence % 2 == 0

    def encode(self) -> bytes:
        documents: dict[str, Json] = {name: list(place) for name, place in self.documents.items()}
        body: dict[str, Json] = {
            "root": self.root_id,
            "save": str(self.save),
            "rank": self.rank,
            "world_size": self.world_size,
            "number": self.number,
            "sequence": self.sequence,
            "body_nbytes": self.body_nbytes,
            "documents": documents,
        }
        data = encode("slot", body if self.check is None else {**body, "check": str(self.check)})
        assert len(data) <= PAGE_BYTES
        return data.ljust(PAGE_BYTES, b"\0")

    @classmethod
    def decode(cls, data: bytes, where: str) -> SlotHeader:
        fields = decode("slot", data.rstrip(b"\0"), where)
        documents = {}
        for name, place in fields.mapping("documents").items():
            match place:
                case [int(offset), int(nbytes), str(digest)] if offset >= PAGE_BYTES and 0 <= nbytes < 2**40:
                    documents[name] = (offset, nbytes, digest)
                case _:
                    raise fields.fail(f"invalid place of a document: {str(place)[:80]}")
        return cls(
            fields.digest("root"),
            parse_save(fields.text("save")),
            fields.integer("rank", 0, MAX_RANK),
            fields.integer("world_size", 1, MAX_RANK + 1),
            fields.integer("number"),
            fields.integer("sequence"),
            fields.integer("body_nbytes"),
            documents,
            decode_check(fields),
        )
