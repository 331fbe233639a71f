"""Whether parts are whole: take anything away, and it is missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from support import layout_of, shards_of, state

from ckptlib.catalog.completeness import Proof
from ckptlib.format import body_layout
from ckptlib.format.box import Box
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import ByHand, Layout, Mesh, OwnPerRank, Placed, TensorEntry
from ckptlib.format.part import Pack, Part
from ckptlib.format.sharding import Shard

SAVE = SaveId(1, GenerationId(1, "0" * 8))


def missing(parts: Sequence[Part], layouts: Mapping[str, Layout]) -> str | None:
    proof = Proof()
    for part in parts:
        part.table.check(layouts[part.table.layout], "here")
        proof.add(part, layouts[part.table.layout])
    return proof.missing()


def part_of(layout: Layout, rank: int, shards: list[tuple[str, Box]]) -> Part:
    table = body_layout.lay_out(layout, shards)
    digests = ("0" * 32,) * len(table.nbytes)
    packs = (Pack(SAVE.pack_key(rank, "0" * 8, 0), 1 << 40, 0.0),)
    return Part(SAVE, rank, layout.world_size, "0" * 8, table, packs, "xxh3", digests, {}, {}, 0.0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_shard_that_is_removed_is_missed(world_size: int) -> None:
    layout = layout_of(state(1), world_size)
    layouts = {layout.digest: layout}
    shards = {rank: shards_of(layout, rank) for rank in range(world_size)}
    whole = [part_of(layout, rank, s) for rank, s in shards.items()]
    assert missing(whole, layouts) is None
    for rank, i in ((r, i) for r in shards for i in range(len(shards[r]))):
        name, box = shards[rank][i]
        torn = [*whole]
        torn[rank] = part_of(layout, rank, shards[rank][:i] + shards[rank][i + 1 :])
        assert missing(torn, layouts) == f"{name}{box}"


def test_a_box_that_is_written_twice_is_no_hole_and_hides_none() -> None:
    layout = Layout(2, (TensorEntry("a", "float32", (8,), ByHand()),))
    layouts = {layout.digest: layout}

    def of(*boxes: Box) -> str | None:
        return missing([part_of(layout, rank, [("a", box)]) for rank, box in enumerate(boxes)], layouts)

    assert of(Box((0,), (8,)), Box((0,), (8,))) is None
    assert of(Box((0,), (6,)), Box((2,), (6,))) is None
    assert of(Box((0,), (4,)), Box((0,), (4,))) == "a[4:8]"
    assert of(Box((0,), (3,)), Box((5,), (3,))) == "a[3:5]"


def test_each_of_the_tensors_that_are_cut_alike_is_looked_at() -> None:
    layout = Layout(2, tuple(TensorEntry(name, "float32", (8,), ByHand()) for name in "abc"))
    low, high = Box((0,), (4,)), Box((4,), (4,))
    parts = [part_of(layout, 0, [("a", low), ("b", low), ("c", low)]), part_of(layout, 1, [("a", high), ("c", high)])]
    assert missing(parts, {layout.digest: layout}) == "b[4:8]"


def test_boxes_that_overlap_do_not_hide_a_hole_of_a_placed_tensor() -> None:
    """Their sizes add up to the whole."""
    layout = Layout(2, (TensorEntry("a", "float32", (8,), Placed(Mesh((2,), (0, 1)), (Shard(0),), None)),))
    parts = [part_of(layout, 0, [("a", Box((0,), (4,)))]), part_of(layout, 1, [("a", Box((2,), (4,)))])]
    assert missing(parts, {layout.digest: layout}) == "a[6:8]"


def test_every_rank_must_write_its_own_of_what_is_per_rank() -> None:
    layout = Layout(
        2, (TensorEntry("empty", "uint8", (0,), OwnPerRank()), TensorEntry("rng", "uint8", (16,), OwnPerRank()))
    )
    layouts = {layout.digest: layout}
    own = [("rng", Box.whole((16,)))]
    assert missing([part_of(layout, 0, own), part_of(layout, 1, own)], layouts) is None
    assert missing([part_of(layout, 0, own), part_of(layout, 1, [])], layouts) == "rng of rank 1"


def test_ranks_may_have_layouts_of_their_own() -> None:
    """Pipeline stages: a tensor that stands in one layout only must still be whole."""
    first, second = (Layout(2, (TensorEntry(name, "float32", (4,), ByHand()),)) for name in "ab")
    layouts = {first.digest: first, second.digest: second}
    whole = [("a", Box.whole((4,)))], [("b", Box.whole((4,)))]
    assert missing([part_of(first, 0, whole[0]), part_of(second, 1, whole[1])], layouts) is None
    assert missing([part_of(first, 0, whole[0]), part_of(second, 1, [])], layouts) == "b[0:4]"
