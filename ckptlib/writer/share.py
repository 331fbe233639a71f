"""A rank's share of a save, put together: what was taken over from its parent, and what was put. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckptlib.format.part import Pack, Part
from ckptlib.format.places import Coding, Places


@dataclass(frozen=True, slots=True)
class PutChunks:
    """Chunks that were put, in packs of their own."""

    packs: tuple[Pack, ...]
    chunks: tuple[int, ...]
    """Positions in the table."""
    numbers: tuple[int, ...]
    """Of each: position in `packs`."""
    offsets: tuple[int, ...]
    """Of each: in the pack's file."""
    codings: Mapping[int, Coding] = field(default_factory=dict)
    """By chunk."""


def assemble(
    num_chunks: int, parent: Part | None, taken: Sequence[int], put: Sequence[PutChunks]
) -> tuple[tuple[Pack, ...], Places]:
    """The packs of a part, and the places of its chunks: those `taken` from the parent, and those that were put."""
    packs: list[Pack] = []
    numbers, offsets = [0] * num_chunks, [0] * num_chunks
    codings: dict[int, Coding] = {}
    if parent is not None:
        new = _take(parent, taken, packs, codings)
        table = parent.table
        for chunk in taken:
            numbers[chunk], offsets[chunk] = new[table.packs[chunk]], table.offsets[chunk]
    for some in put:
        first = len(packs)
        packs += some.packs
        codings.update(some.codings)
        for chunk, number, offset in zip(some.chunks, some.numbers, some.offsets, strict=True):
            numbers[chunk], offsets[chunk] = first + number, offset
    return tuple(packs), Places(tuple(numbers), tuple(offsets), codings)


def _take(parent: Part, taken: Sequence[int], packs: list[Pack], codings: dict[int, Coding]) -> dict[int, int]:
    """Adds what the taken chunks need of the parent; returns the new positions of its packs."""
    needed = {*map(parent.table.packs.__getitem__, taken)}
    kept = {*taken} if parent.codings else set()
    bases = {c.base.pack for chunk, c in parent.codings.items() if c.base is not None and chunk in kept}
    new = {old: number for number, old in enumerate(sorted(needed | bases))}
    packs += [parent.packs[old] for old in new]
    for chunk, coding in parent.codings.items():
        if chunk in kept:
            base = None if coding.base is None else coding.base._replace(pack=new[coding.base.pack])
            codings[chunk] = Coding(coding.codec, coding.stored, base, coding.raw_digest)
    return new
