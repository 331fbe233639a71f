"""Packs that a killed import has left: which of them count, and which are put again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.persists import OneRank
from support import replace_object

from ckptlib.stores.memory import MemoryStore
from ckptlib.writer.persist import Persister

PACK_NBYTES = 1 << 16

ARRAYS = {name: np.full(PACK_NBYTES - 4096, i, np.uint8) for i, name in enumerate("abc")}


@pytest.mark.parametrize(
    "alter",
    [
        None,
        lambda data: data.replace(b'"rank": "000000"', b'"rank": "000001"'),
        lambda data: data[:-1] + b"\2",
        lambda data: data + b"\0",
        lambda data: data[:-1],
    ],
    ids=["whole", "another header", "another byte", "longer", "shorter"],
)
def test_a_pack_counts_where_each_of_its_bytes_is_what_would_be_put(
    tmp_path: Path, alter: Callable[[bytes], bytes] | None
) -> None:
    store = MemoryStore()
    job = OneRank(tmp_path, store, "raw")
    save, snapshot = job.slot(ARRAYS)
    parts = []
    for _ in range(2):
        persister = Persister(store, ThreadPoolExecutor(1), 0, 1, pack_nbytes=PACK_NBYTES)
        parts.append(persister.persist(snapshot, save))
        if alter is not None and len(parts) == 1:
            altered = parts[0].packs[1].key
            before = store.get(altered)
            assert alter(before) != before
            replace_object(store, altered, alter(before))
    left, taken = ([pack.key for pack in part.packs] for part in parts)
    assert len(left) == 3
    assert [a == b for a, b in zip(left, taken, strict=True)] == [True, alter is None, True]
    job.check(parts[1], ARRAYS)
    snapshot.unlink()
