"""The layouts that a persister puts, beside a retention that deletes those that no step names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers.actors import ActorStore
from helpers.persists import OneRank

from ckptlib.catalog.catalog import Catalog, Steps
from ckptlib.catalog.commit import Committer
from ckptlib.format import keys
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer.drained_parents import DrainedParents
from ckptlib.writer.persist import Persister


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


def test_a_layout_that_a_sweep_of_the_disk_removes_before_a_part_names_it_is_put_again(tmp_path: Path) -> None:
    """Another rank's sweep has seen no part with it."""
    job = OneRank(tmp_path, MemoryStore(), "raw")
    disk, removed = ActorStore(MemoryStore()), list[str]()

    def sweep(op: str, key: str) -> None:
        if op == "put" and key.startswith(keys.PARTS):
            removed.extend(entry.key for entry in disk.scan(keys.LAYOUTS))
            disk.delete(*removed)

    disk.before = sweep
    save, slot = job.slot({"w": np.zeros(4, np.float32)})
    drained = DrainedParents(lambda: Steps([], []))
    part = Persister(disk, ThreadPoolExecutor(1), 0, 1, drained=drained).persist(slot, save)
    slot.unlink()
    assert removed == [keys.layout_key(part.table.layout)] == [entry.key for entry in disk.scan(keys.LAYOUTS)]


def test_a_layout_that_is_on_the_disk_is_flushed_once_for_each_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each flush of a directory is a write to the journal, for which the save waits."""
    job = OneRank(tmp_path, MemoryStore(), "raw")
    disk, drained = LocalStore(str(tmp_path / "disk")), DrainedParents(lambda: Steps([], []))
    persister, flushed, flush = Persister(disk, ThreadPoolExecutor(1), 0, 1, drained=drained), list[str](), disk.flush
    monkeypatch.setattr(disk, "flush", lambda prefix: (flushed.append(prefix), flush(prefix)))
    for found in ([], [keys.LAYOUTS]):
        save, slot = job.slot({"w": np.zeros(4, np.float32)})
        persister.persist(slot, save)
        slot.unlink()
        assert flushed == found
