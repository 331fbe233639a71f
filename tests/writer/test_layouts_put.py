"""The layouts that a persister puts, beside a retention that deletes those that no step names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers.persists import OneRank

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.format import keys
from ckptlib.stores.memory import MemoryStore


def test_a_layout_that_went_with_its_steps_is_put_again_when_the_state_has_it_again(tmp_path: Path) -> None:
    """As of a job that evaluates once a day. Whoever commits need not know it from before."""
    store = MemoryStore()
    job = OneRank(tmp_path, store, "raw")
    trains, evaluates = {"w": np.zeros(4, np.float32)}, {"scores": np.ones(4, np.float32)}
    layout = keys.layout_key(job.save(evaluates).table.layout)
    job.save(trains)
    for known in (True, False):
        store.delete(layout, keys.copy_key(layout))
        part = job.save(evaluates, commit=False)
        Committer(job.catalog if known else Catalog(store)).commit(part.save, [part.encode()[0]])
        job.check(part, evaluates)
        assert store.get(layout) == store.get(keys.copy_key(layout))
        job.save(trains)
