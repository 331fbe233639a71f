"""What two ranks wrote of one tensor is the same, or there is no step: also where chunks look alike or were altered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from support import ATTEMPT, layout_of, make_generation, put_part, replace_object

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.completeness import Doubt
from ckptlib.catalog.shards import PartIndex, ShardComparer
from ckptlib.errors import CorruptData, SaveFailed
from ckptlib.format import body_layout
from ckptlib.format.box import Box
from ckptlib.format.digests import ALGORITHMS, XXH3, digester
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.part import Pack, Part
from ckptlib.stores import Store

SCALAR = Box.whole(())
SAVE = SaveId(10, GenerationId(1, "00000001"))


def put_both(catalog: Catalog, *of_ranks: Mapping[str, float]) -> tuple[SaveId, list[PartName]]:
    """Each rank writes all of its scalars, in one chunk, in the order of their names."""
    save = SaveId(10, make_generation(catalog))
    names = []
    for rank, scalars in enumerate(of_ranks):
        tensors = {name: np.array(value) for name, value in scalars.items()}
        shards = [(name, SCALAR) for name in sorted(tensors)]
        names.append(put_part(catalog, save, rank, layout_of(tensors, len(of_ranks)), tensors, shards=shards))
        assert len(catalog.part(names[-1]).digests) == 1
    return save, names


def test_equal_chunks_in_which_a_tensor_lies_elsewhere_are_not_equal_tensors(catalog: Catalog) -> None:
    """One digest for both: of rank 0's `x` and `y`, and of rank 1's `a` and `x`."""
    save, names = put_both(catalog, {"x": 0.0, "y": 1.0}, {"a": 0.0, "x": 1.0})
    assert catalog.part(names[0]).digests == catalog.part(names[1]).digests
    with pytest.raises(SaveFailed, match=r"x.*: ranks 0 and 1 saved different bytes for it"):
        Committer(catalog).commit(save, names)
    assert catalog.saves() == []


def test_other_chunks_in_which_a_tensor_is_the_same_are_no_reason_to_refuse_it(catalog: Catalog) -> None:
    save, names = put_both(catalog, {"x": 1.0, "y": 1.0}, {"a": 0.0, "x": 1.0})
    Committer(catalog).commit(save, names)
    assert catalog.saves() == [save]


def test_a_chunk_that_was_altered_into_what_the_other_rank_has_is_not_the_same(store: Store, catalog: Catalog) -> None:
    """The step would have been committed, and no load would have taken that chunk."""
    save, names = put_both(catalog, {"x": 1.0, "y": 1.0}, {"a": 7.0, "x": 2.0})
    (pack,) = catalog.part(names[1]).packs
    data = store.get(pack.key)
    assert data.count(np.float64(2).tobytes()) == 1
    replace_object(store, pack.key, data.replace(np.float64(2).tobytes(), np.float64(1).tobytes()))
    with pytest.raises(CorruptData, match="the object was altered after it was written"):
        Committer(catalog).commit(save, names)
    assert catalog.saves() == []


@pytest.mark.parametrize("other", [np.zeros(8, np.float32), np.zeros(9)], ids=["dtype", "shape"])
def test_a_name_that_stands_for_tensors_of_two_kinds_makes_no_step(catalog: Catalog, other: np.ndarray) -> None:
    """Each is whole by itself, and loads would take either."""
    save = SaveId(10, make_generation(catalog))
    names = []
    for rank, array in enumerate((np.zeros(8), other)):
        tensors = {"x": array}
        shards = [("x", Box.whole(array.shape))]
        names.append(put_part(catalog, save, rank, layout_of(tensors, 2), tensors, shards=shards))
    told = rf"x is float64\[8\] on rank 0 and {other.dtype}\[{len(other)}\] on rank 1"
    with pytest.raises(SaveFailed, match=told):
        Committer(catalog).commit(save, names)
    assert catalog.saves() == []


@pytest.mark.parametrize("differs", [False, True])
def test_shards_that_are_cut_into_other_chunks(catalog: Catalog, differs: bool) -> None:
    save = SaveId(10, make_generation(catalog))
    names = []
    for rank, chunk_bytes in enumerate((16384, 32768)):
        tensors = {"x": np.arange(40_000, dtype=np.float32)}
        tensors["x"][-1] += differs and rank
        shards = [("x", Box.whole((40_000,)))]
        names.append(
            put_part(catalog, save, rank, layout_of(tensors, 2), tensors, shards=shards, chunk_bytes=chunk_bytes)
        )
    assert len({len(catalog.part(name).digests) for name in names}) == 2
    if differs:
        with pytest.raises(SaveFailed, match="ranks 0 and 1 saved different bytes for it"):
            Committer(catalog).commit(save, names)
    else:
        Committer(catalog).commit(save, names)
    assert catalog.saves() == [] if differs else [save]


class Bodies:
    """Parts, and the bytes that they tell of."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}

    def read(self, pack: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = self._bodies[pack][offset : offset + len(buffer)]

    def part(self, arrays: Sequence[np.ndarray], algorithm: str = XXH3) -> PartIndex:
        """Of `x`, once for each of these arrays."""
        layout = layout_of({"x": arrays[0]})
        table = body_layout.lay_out(layout, [("x", Box.whole(array.shape)) for array in arrays])
        body = bytearray(body_layout.body_nbytes(table))
        for array, begin in zip(arrays, table.begins(table.sizes(layout)), strict=True):
            body[begin : begin + array.nbytes] = array.tobytes()
        digest = digester(algorithm)
        digests = tuple(digest(bytes(body[o : o + n])) for o, n in zip(table.offsets, table.nbytes, strict=True))
        key = SAVE.pack_key(0, ATTEMPT, len(self._bodies))
        self._bodies[key] = bytes(body)
        packs = (Pack(key, len(body), 0.0),)
        return PartIndex(Part(SAVE, 0, 1, ATTEMPT, table, packs, algorithm, digests, {}, {}, 0.0), layout)


@pytest.mark.parametrize("second", [1.0, 2.0])
def test_a_part_that_has_one_box_twice(second: float) -> None:
    """The two are compared, not one of them with itself."""
    bodies = Bodies()
    part = bodies.part([np.array(1.0), np.array(second)])
    doubt = Doubt("x", SCALAR, (0, 0), (SCALAR, SCALAR))
    assert ShardComparer(bodies.read).settles(doubt, lambda rank: part) == (second == 1.0)


def test_shards_that_differ_elsewhere_are_the_same_in_a_region_where_they_do_not() -> None:
    bodies, array = Bodies(), np.arange(3000, dtype=np.float32)
    first, second = (bodies.part([np.where(array < 2999, array, last)]) for last in (1, 2))
    comparer = ShardComparer(bodies.read)
    assert comparer.same(first.shard(0), second.shard(0), Box((0,), (2999,)))
    assert not comparer.same(first.shard(0), second.shard(0), Box((2999,), (1,)))
    assert not comparer.same(first.shard(0), second.shard(0), Box.whole((3000,)))


def test_digests_of_two_algorithms_tell_nothing() -> None:
    bodies, array = Bodies(), np.arange(3000, dtype=np.float32)
    first, *others = (bodies.part([array], algorithm).shard(0) for algorithm in ALGORITHMS)
    assert others
    assert all(ShardComparer(bodies.read).same(first, other, Box.whole((3000,))) for other in others)
