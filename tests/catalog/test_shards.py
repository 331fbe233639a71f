"""What two ranks wrote of one tensor is the same, or there is no step: also where chunks look alike or were altered."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from support import layout_of, make_generation, put_part, replace_object

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.errors import CorruptData, SaveFailed
from ckptlib.format.box import Box
from ckptlib.format.keys import PartName, SaveId
from ckptlib.stores import Store

SCALAR = Box.whole(())


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
