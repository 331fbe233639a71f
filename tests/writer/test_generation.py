"""The record of a job's generation: put in the root that the job opened, and in no other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
from helpers.servers import ObjectStorage
from store_conformance import keys

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import Superseded
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import ROOT, GenerationId
from ckptlib.format.manifest import Generation, Root
from ckptlib.stores import open_store
from ckptlib.stores.memory import MemoryStore
from ckptlib.writer.generation import GenerationRecord

RACES = 20


def record(number: int, root: str) -> GenerationRecord:
    generation = GenerationId(1, f"{number:08x}")
    return GenerationRecord(Generation(generation, 1, None, 0.0, {}, "here"), root, 1, continues=True)


def test_a_root_that_another_job_has_replaced_gets_no_record(tmp_path: Path) -> None:
    store = MemoryStore()
    mine = Catalog(store).open_root(Root("a" * 32, XXH3, 60.0))
    store.delete(ROOT)  # as a store does that lets the later of two puts win
    theirs = Catalog(store).open_root(Root("b" * 32, XXH3, 60.0))
    with pytest.raises(Superseded, match="another job made it in the same moment"):
        record(1, mine.id).put(Catalog(store))
    assert keys(store, "generations/") == []
    record(2, theirs.id).put(Catalog(store))
    assert len(keys(store, "generations/")) == 1


@pytest.mark.parametrize("server", ["s3", "juicefs"])
def test_two_jobs_that_make_a_root_at_once(server: str, request: pytest.FixtureRequest) -> None:
    """One id is there in the end. Who holds the other is told before it commits anything; one of them goes on."""
    storage: ObjectStorage = request.getfixturevalue(server)
    for race in range(RACES):
        url, ready, opened = storage.url(), Barrier(2), Barrier(2)

        def job(n: int, url: str = url, ready: Barrier = ready, opened: Barrier = opened, race: int = race) -> str:
            with open_store(url, storage.options()) as store:
                ready.wait()
                mine = Catalog(store).open_root(Root(f"{race:015x}{n}" * 2, XXH3, 60.0)).id
                opened.wait()
                try:
                    record(n, mine).put(Catalog(store))
                except Superseded:
                    return ""
                return mine

        with ThreadPoolExecutor(2) as jobs:
            held = [*jobs.map(job, range(2))]
        with open_store(url, storage.options()) as store:
            assert {*held} - {""} == {Catalog(store).root().id}
