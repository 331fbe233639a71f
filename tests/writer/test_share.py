"""A rank's share, put together from what was taken over and what was put: each chunk ends where its bytes are."""

from __future__ import annotations

from collections.abc import Sequence

from helpers.handmade_parts import CHUNK_NBYTES, digest_of, pack, part_of, save_id
from hypothesis import given
from hypothesis import strategies as st

from ckptlib.format.part import Part
from ckptlib.format.places import Base, Coding, Loss
from ckptlib.writer.share import PutChunks, assemble

NOTHING = PutChunks((), (), (), ())
DIGESTS = tuple(digest_of(chunk) for chunk in range(16))
"""Of a snapshot; those of `part_of`, too."""
LOSS = Loss(digest_of("raw"), 0.5, 0.1)


def put(save_step: int, chunks: Sequence[int], number: int = 0) -> PutChunks:
    """All in one pack, in order."""
    if not chunks:
        return NOTHING
    offsets = tuple(4096 + at * CHUNK_NBYTES for at in range(len(chunks)))
    return PutChunks((pack(save_id(save_step), number=number),), tuple(chunks), (0,) * len(chunks), offsets)


def parent_of(num: int, numbers: Sequence[int], codings: dict[int, Coding] | None = None) -> Part:
    return part_of(save_id(9), range(num), [pack(save_id(n + 1)) for n in range(max(numbers) + 1)], numbers, codings)


def test_a_whole_save_has_only_its_own_packs() -> None:
    own = put(5, [0, 1, 2])
    packs, places, _ = assemble(DIGESTS[:3], None, (), [own, NOTHING])
    assert packs == own.packs
    assert places.packs == (0, 0, 0)
    assert places.offsets == own.offsets


def test_a_save_in_which_nothing_changed_has_only_its_parents() -> None:
    parent = parent_of(3, [0, 1, 0])
    packs, places, _ = assemble(DIGESTS[:3], parent, (0, 1, 2), [NOTHING, NOTHING])
    assert packs == parent.packs
    assert places == parent.places


def test_packs_of_which_nothing_is_taken_are_not_named() -> None:
    """A pack that a part names stays, with all of its set."""
    parent = parent_of(4, [0, 1, 2, 1])
    packs, places, _ = assemble(DIGESTS[:4], parent, (1, 3), [put(9, [0, 2])])
    assert packs == (parent.packs[1], pack(save_id(9)))
    assert places.packs == (1, 0, 1, 0)


def test_changed_and_carried_chunks_lie_in_packs_of_their_own() -> None:
    changed, carried = put(9, [0], number=0), put(9, [2], number=1)
    packs, places, _ = assemble(DIGESTS[:3], parent_of(3, [0, 0, 0]), (1,), [changed, carried])
    assert [packs[number] for number in places.packs] == [changed.packs[0], pack(save_id(1)), carried.packs[0]]


def test_codings_of_taken_chunks_come_along_and_others_do_not() -> None:
    base = Base(1, 50, CHUNK_NBYTES, None, digest_of("base"))
    codings = {0: Coding("patch", 10, base, LOSS), 1: Coding("planes", 20), 2: Coding("planes", 30)}
    parent = parent_of(3, [2, 2, 0], codings)
    new = PutChunks((pack(save_id(9)),), (1,), (0,), (4096,), {1: Coding("zstd", 40)})
    packs, places, _ = assemble(DIGESTS[:3], parent, (0, 2), [new])
    assert packs == (*parent.packs, *new.packs), "that of the base, too"
    assert places.codings == {
        0: Coding("patch", 10, base._replace(pack=1), LOSS),
        1: Coding("zstd", 40),
        2: Coding("planes", 30),
    }


def test_the_base_of_a_chunk_that_was_written_anew_is_given_up() -> None:
    base = Base(0, 50, CHUNK_NBYTES, None, digest_of("base"))
    parent = parent_of(2, [1, 2], {0: Coding("patch", 10, base)})
    packs, places, _ = assemble(DIGESTS[:2], parent, (1,), [put(9, [0])])
    assert packs == (parent.packs[2], pack(save_id(9)))
    assert places.codings == {}


def test_a_new_frame_may_have_its_base_in_a_pack_of_the_parent() -> None:
    """Of which nothing else may be left."""
    parent = parent_of(2, [1, 2])
    coding = Coding("patch", 10, Base(1, 50, CHUNK_NBYTES, None, digest_of("base")))
    new = PutChunks((pack(save_id(9)),), (0,), (0,), (4096,), {0: coding})
    packs, places, _ = assemble(DIGESTS[:2], parent, (1,), [new])
    assert packs == (parent.packs[1], parent.packs[2], *new.packs)
    assert places.packs == (2, 1)
    assert packs[places.codings[0].base.pack] == parent.packs[1]  # type: ignore[union-attr]


def test_digests_are_those_of_what_a_load_gives_back() -> None:
    """Of a lossy chunk that is taken over as it was decoded, of one that is new as it will be; of others as saved."""
    parent = part_of(save_id(1), ["was", 1, 2], [pack(save_id(1))], [0, 0, 0], {0: Coding("lossy", 9, None, LOSS)})
    new = PutChunks(
        (pack(save_id(9)),), (1,), (0,), (0,), {1: Coding("lossy", 9, None, LOSS)}, {1: digest_of("will be")}
    )
    found = assemble(DIGESTS[:3], parent, (0, 2), [new])
    assert found.digests == (digest_of("was"), digest_of("will be"), DIGESTS[2])


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["taken", "changed", "carried"])), min_size=1, max_size=12)
)
def test_each_chunk_lies_where_it_was_or_where_it_was_put(chunks: list[tuple[int, str]]) -> None:
    parent = parent_of(len(chunks), [number for number, _ in chunks])
    of = {
        kind: [chunk for chunk, (_, its) in enumerate(chunks) if its == kind]
        for kind in ("taken", "changed", "carried")
    }
    some = [put(10, of["changed"], 0), put(10, of["carried"], 1)]
    packs, places, digests = assemble(DIGESTS[: len(chunks)], parent, of["taken"], some)
    where = [(packs[number], offset) for number, offset in zip(places.packs, places.offsets, strict=True)]
    expected = {chunk: (parent.packs[parent.table.packs[chunk]], parent.table.offsets[chunk]) for chunk in of["taken"]}
    for its in some:
        expected |= {
            chunk: (its.packs[number], offset)
            for chunk, number, offset in zip(its.chunks, its.numbers, its.offsets, strict=True)
        }
    assert where == [expected[chunk] for chunk in range(len(chunks))]
    assert {*places.packs} == {*range(len(packs))}
    assert len({*packs}) == len(packs)
    assert digests == DIGESTS[: len(chunks)]
