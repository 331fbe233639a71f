"""Parts that say what a test wants them to say; their packs are nowhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.keys import GenerationId, PackSet, SaveId
from ckptlib.format.part import Pack, Part
from ckptlib.format.places import Coding
from ckptlib.format.table import Table

CHUNK_NBYTES = 100
ATTEMPT = "a77e3b70"
NOW = 1e9


def save_id(step: int, number: int = 1) -> SaveId:
    return SaveId(step, GenerationId(number, f"{number:08x}"))


def digest_of(value: object) -> str:
    return digester(XXH3)(str(value).encode())


def pack(of: PackSet | SaveId, created: float = NOW, nbytes: int = 1 << 20, number: int = 0) -> Pack:
    found = of if isinstance(of, PackSet) else PackSet(of)
    return Pack(found.save.pack_key(0, ATTEMPT, number, found.carried), nbytes, created)


def part_of(
    save: SaveId,
    values: Sequence[object],
    packs: Sequence[Pack],
    numbers: Sequence[int],
    codings: Mapping[int, Coding] | None = None,
) -> Part:
    """One chunk for each of `values`, whose digests are those of these; `numbers`: the pack of each.

    Chunks lie in their packs one behind the other.
    """
    ends = [0] * len(packs)
    offsets = []
    for number in numbers:
        offsets.append(ends[number])
        ends[number] += CHUNK_NBYTES
    num = len(values)
    boxes = tuple(Box((chunk,), (1,)) for chunk in range(num))
    table = Table("0" * 32, (0,) * num, boxes, (1,) * num, tuple(numbers), tuple(offsets), (CHUNK_NBYTES,) * num)
    digests = tuple(map(digest_of, values))
    return Part(save, 0, 1, ATTEMPT, table, tuple(packs), XXH3, digests, {}, {}, 0.0, codings=codings or {})


def renamed(part: Part, save: SaveId) -> Part:
    """The same for another save."""
    return replace(part, save=save)
