"""A rank's share of a save: the chunks taken over from its parent, and those that were put. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ckptlib.format.part import Pack, Part
from ckptlib.format.places import Coding, Places


@dataclass(frozen=True, slots=True)
class PutChunks:
    """Chunks that were put, in packs of their own."""

    packs: tuple[Pack, ...]
    chunks: tuple[int, ...]
    """Positions in the table."""
    numbers: tuple[int, ...]
    """Position in `packs` of each chunk."""
    offsets: tuple[int, ...]
    """Offset of each chunk in the pack's file."""
    codings: Mapping[int, Coding] = field(default_factory=dict)
    """The coding of each chunk that has one. Bases lie in packs of the parent, and are numbered as there."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """Digests of the bytes that a load gives back, for chunks that a lossy codec changed."""


class Share(NamedTuple):
    """What a part says of its chunks: their packs, places and digests."""

    packs: tuple[Pack, ...]
    places: Places
    digests: tuple[str, ...]


def assemble(digests: Sequence[str], parent: Part | None, taken: Sequence[int], put: Sequence[PutChunks]) -> Share:
    """Returns the share of a snapshot with these digests: chunks `taken` from the parent, and those that were put."""
    packs: list[Pack] = []
    numbers, offsets, loaded = [0] * len(digests), [0] * len(digests), [*digests]
    codings: dict[int, Coding] = {}
    moved: dict[int, int] = {}
    if parent is not None:
        table = parent.table
        codings = {c: parent.codings[c] for c in taken if c in parent.codings} if parent.codings else {}
        bases = [coding.base for some in (codings, *(p.codings for p in put)) for coding in some.values()]
        needed = {*map(table.packs.__getitem__, taken), *(base.pack for base in bases if base is not None)}
        moved = {old: number for number, old in enumerate(sorted(needed))}
        packs += [parent.packs[old] for old in moved]
        for chunk in taken:
            numbers[chunk], offsets[chunk] = moved[table.packs[chunk]], table.offsets[chunk]
        for chunk, coding in codings.items():
            if coding.loss is not None:
                loaded[chunk] = parent.digests[chunk]
    for some in put:
        first = len(packs)
        packs += some.packs
        codings.update(some.codings)
        for chunk, number, offset in zip(some.chunks, some.numbers, some.offsets, strict=True):
            numbers[chunk], offsets[chunk] = first + number, offset
        for chunk, digest in some.digests.items():
            loaded[chunk] = digest
    codings = {chunk: _moved(coding, moved) for chunk, coding in codings.items()}
    return Share(tuple(packs), Places(tuple(numbers), tuple(offsets), codings), tuple(loaded))


def _moved(coding: Coding, moved: Mapping[int, int]) -> Coding:
    """Returns the coding with the pack of its base numbered as in the new part."""
    if coding.base is None:
        return coding
    return replace(coding, base=coding.base._replace(pack=moved[coding.base.pack]))
