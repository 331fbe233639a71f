"""Usage counts ranges as one would who looks at every byte alone, whatever parts name."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from ckptlib.cli.usage import Usage
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, PackSet, SaveId
from ckptlib.format.part import Pack, Part
from ckptlib.format.places import Base, Coding
from ckptlib.format.table import Table
from ckptlib.stores import Entry

PACK_NBYTES = 30
GENERATION = GenerationId(1, "0" * 8)
SAVES = [SaveId(step, GENERATION) for step in range(1, 5)]
PACKS = [save.pack_key(0, "0" * 8, number) for save in SAVES for number in range(2)]

Chunk = tuple[int, int, int, tuple[int, int, int] | None]
"""Pack, offset and bytes; those of a base."""


def places(most: int) -> st.SearchStrategy[tuple[int, int, int]]:
    return st.tuples(st.integers(0, len(PACKS) - 1), st.integers(0, most - 1), st.integers(1, 8)).map(
        lambda at: (at[0], at[1], min(at[2], most - at[1]))
    )


CHUNKS = st.lists(
    st.tuples(places(PACK_NBYTES), st.none() | places(PACK_NBYTES)).map(lambda c: (*c[0], c[1])), max_size=8
)


def part(save: SaveId, chunks: list[Chunk]) -> Part:
    """One that was not decoded, so that it may name the same bytes twice."""
    sizes = tuple(2 * nbytes if base else nbytes for _, _, nbytes, base in chunks)
    table = Table("0" * 32, (), (), (), tuple(chunk[0] for chunk in chunks), tuple(chunk[1] for chunk in chunks), sizes)
    codings = {
        at: Coding("patch", nbytes, Base(*base, None, "0" * 32))
        for at, (_, _, nbytes, base) in enumerate(chunks)
        if base is not None
    }
    packs = tuple(Pack(key, PACK_NBYTES, 0.0) for key in PACKS)
    return Part(save, 0, 1, "0" * 8, table, packs, XXH3, ("0" * 32,) * len(chunks), {}, {}, 0.0, None, codings)


@given(st.lists(CHUNKS, min_size=1, max_size=4))
def test_against_every_byte_alone(steps: list[list[Chunk]]) -> None:
    needs: dict[tuple[int, int], set[int]] = defaultdict(set)
    usage = Usage()
    for number, chunks in enumerate(steps):
        usage.add(part(SAVES[number], chunks))
        for pack, offset, nbytes, base in chunks:
            for first, start, count in [(pack, offset, nbytes), *([base] if base else [])]:
                for at in range(start, start + count):
                    needs[first, at].add(number)
    committed = {*SAVES[: len(steps)]}
    used = {PackSet(SAVES[pack // 2]) for pack, _ in needs} | {PackSet(save) for save in committed}
    found = usage.finish([Entry(key, PACK_NBYTES, 0.0) for key in PACKS], committed, dict.fromkeys(used))
    for number in range(len(steps)):
        step = usage.steps[SAVES[number]]
        assert step.stored == sum(number in of for of in needs.values())
        assert step.own == sum(of == {number} for of in needs.values())
        assert step.shared == sum(number in of and len(of) > 1 for of in needs.values())
    for number, save in enumerate(SAVES):
        mine = [at for at in needs if at[0] // 2 == number]
        assert (found[save].written, found[save].needed) == (2 * PACK_NBYTES, len(mine))
        rest = 2 * PACK_NBYTES - len(mine)
        touched = {pack for pack, _ in mine}
        framing = PACK_NBYTES * len(touched) - len(mine) if save in committed else 0
        assert found[save].framing == framing
        assert found[save].dead == (rest - framing if PackSet(save) in used else 0)
        assert found[save].idle == (0 if PackSet(save) in used else rest)
    assert usage.missing == []


def test_packs_that_are_not_there_are_told() -> None:
    usage = Usage()
    usage.add(part(SAVES[0], [(0, 4, 8, None), (1, 0, 8, None), (2, 0, 8, None)]))
    entries = [Entry(PACKS[0], 12, 0.0), Entry(PACKS[1], 7, 0.0), Entry("packs/foreign", 100, 0.0)]
    found = usage.finish(entries, {SAVES[0]}, {PackSet(SAVES[0]): None})
    assert usage.missing == [PACKS[1], PACKS[2]]
    assert found[SAVES[0]].written == 19


def test_a_pack_that_steps_share_whole_takes_little_memory() -> None:
    usage = Usage()
    for save in SAVES:
        usage.add(part(save, [(0, at, 1, None) for at in range(4, 28)]))
    assert [len(stretches.owners) for stretches in usage._packs.values()] == [1]
