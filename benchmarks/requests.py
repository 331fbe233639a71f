"""What is an object store asked, and what does that cost? Requests and dollars by checkpoint, at 8 to 1,024 ranks.

No ranks run: their documents and empty packs are laid into a local directory, and rank 0's committer, sweep, `latest`
and `ls` work on it as they do on a bucket. Requests are counted as S3 counts them (see `counting`). What each rank asks
for by itself at a save in a steady state is one listing, one part and its pack; tests/end_to_end asserts that.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from benchmarks.counting import CountingStore, Requests, num_puts
from benchmarks.figures import Figures, Options, run
from benchmarks.scale import GENERATION, layout_of, part_of
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.reading import each
from ckptlib.catalog.retention import sweep
from ckptlib.catalog.sweeper import Sweeper
from ckptlib.cli.ls import committed
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import PartName, SaveId
from ckptlib.format.manifest import Generation, Root
from ckptlib.format.part import Part
from ckptlib.policy.keep import Keep
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import LatencyStore

KEPT = 10
"""Steps that stay; one that was dropped waits, and another goes."""

GRACE = timedelta(hours=24)
KEEP = Keep(KEPT, grace=GRACE)
DEADLINE_S = 3600.0

PACK_BYTES = {"64 MB": 64 * 10**6, "1 GB": 10**9, "12 GB": 12 * 10**9}
"""Of one rank: what changed since the last step, or all."""

LATENCY_S = 0.03


def main(arguments: list[str]) -> None:
    run(arguments, "requests", measure, gb=0.0)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for num_ranks in (2, 8) if options.toy else (8, 128, 1024):
        _measure_root(num_ranks, 20 if options.toy else 300, directory / str(num_ranks), figures)
    _measure_many_steps(40 if options.toy else 1000, figures)


class _Job:
    """A root in a directory, with the steps of a job that keeps some."""

    def __init__(self, num_ranks: int, num_tensors: int, directory: Path) -> None:
        self.num_ranks, self.root = num_ranks, directory
        self.store = CountingStore(LocalStore(str(directory)))
        self.store.is_local = True  # nobody is waited for; all else is the same
        self.catalog = Catalog(self.store)
        self.committer = Committer(self.catalog)
        self.sweeper = Sweeper(self.catalog, KEEP)
        self.catalog.open_root(Root("0" * 32, XXH3, DEADLINE_S))
        self.catalog.generations.put(Generation(GENERATION, num_ranks, None, 0.0, {}, "here"))
        layout = layout_of(num_ranks, num_tensors)
        self.catalog.shared.put_layout(layout.digest, layout.encoded)
        self.names: list[PartName] = []
        for rank in range(num_ranks):
            part = part_of(SaveId(1, GENERATION), rank, layout)
            name, document = part.encode()
            self.names.append(name)
            self._lay(name.key, document)
            if rank == 0:
                self.first: Part = part

    def _lay(self, key: str, data: bytes) -> None:
        """Without the time that a disk takes to make it durable."""
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def persist(self, step: int) -> SaveId:
        """What all ranks put. Of parts but rank 0's only the names are looked at once the step is known to be whole."""
        save = SaveId(step, GENERATION)
        for name in self.names:
            self._lay(save.pack_key(name.rank, name.attempt, 0), b"")
            if step > 1:
                own = self._part(save).encode() if name.rank == 0 else (replace(name, save=save), b"")
                self._lay(own[0].key, own[1])
        return save

    def _part(self, save: SaveId) -> Part:
        """Rank 0's, which took nothing over from another."""
        [pack] = self.first.packs
        key = save.pack_key(self.first.rank, self.first.attempt, 0)
        return replace(self.first, save=save, packs=(replace(pack, key=key),))

    def commit(self, step: int) -> SaveId:
        save = self.persist(step)
        self.committer.commit_when_whole(save, self.num_ranks, lambda: 60.0)
        return save

    def sweep(self) -> None:
        sweep(self.catalog, KEEP, GENERATION)

    def age(self, save: SaveId) -> None:
        """All that is left of a save: beyond the grace period."""
        then = time.time() - 2 * GRACE.total_seconds()
        for prefix in (save.parts_prefix, save.packs_prefix, save.trash_key):
            for entry in self.store.scan(prefix):
                os.utime(self.root / entry.key, (then, then))


def _measure_root(num_ranks: int, num_tensors: int, directory: Path, figures: Figures) -> None:
    job = _Job(num_ranks, num_tensors, directory)
    case = f"{num_ranks:,} ranks, {num_tensors:,} tensors, {KEPT} steps kept"

    def note(what: str, call: Callable[[], object]) -> Requests:
        began = time.perf_counter()
        with job.store.counted() as counts:
            call()
        seconds = time.perf_counter() - began
        found = counts[0]
        kinds = {"put": found.put, "get": found.get, "list": found.list, "delete": found.delete}
        figures.add(case, "ckptlib", what, "requests", [found.total], **kinds)
        figures.add(case, "ckptlib", what, "s", [seconds])
        return found

    first = job.persist(1)
    note("first commit, rank 0", lambda: job.committer.commit_when_whole(first, num_ranks, lambda: 60.0))
    for step in range(2, KEPT + 1):
        job.commit(step)
    job.sweeper.sweep(job.commit(KEPT + 1))
    job.age(first)
    last = job.persist(KEPT + 2)
    commit = note("steady commit, rank 0", lambda: job.committer.commit_when_whole(last, num_ranks, lambda: 60.0))
    swept = note("sweep behind a commit, which drops a step", lambda: job.sweeper.sweep(last))
    note("sweep of all that is there, which deletes a step", job.sweep)
    for what, nbytes in PACK_BYTES.items():
        each_rank = Requests(put=1 + num_puts(nbytes), list=1)
        total = each_rank.times(num_ranks) + commit
        figures.add(case, "ckptlib", f"checkpoint, {what} per rank", "requests", [total.total])
        figures.add(case, "ckptlib", f"checkpoint and sweep, {what} per rank", "$", [(total + swept).dollars])
    reader = Catalog(job.store)
    note("latest, and its manifest", lambda: reader.manifest(reader.resolve("latest")))
    note("latest again", lambda: reader.resolve("latest"))
    note("ls", lambda: committed(Catalog(job.store), False))


def _measure_many_steps(num_steps: int, figures: Figures) -> None:
    """What one after another would take num_steps x LATENCY_S."""
    job_store = MemoryStore()
    store = CountingStore(LatencyStore(job_store, LATENCY_S))
    catalog = Catalog(job_store)
    catalog.open_root(Root("0" * 32, XXH3, DEADLINE_S))
    catalog.generations.put(Generation(GENERATION, 1, None, 0.0, {}, "here"))
    layout = layout_of(1, 1)
    catalog.shared.put_layout(layout.digest, layout.encoded)
    name, document = part_of(SaveId(1, GENERATION), 0, layout).encode()
    job_store.put(name.key, document)
    manifest = Committer(catalog).commit(SaveId(1, GENERATION), [name])
    for step in range(2, num_steps + 1):
        save = SaveId(step, GENERATION)
        parts = (replace(name, save=save),)
        job_store.put(save.manifest_key, replace(manifest, save=save, parts=parts).encode())
    case = f"{num_steps:,} steps, {LATENCY_S * 1000:.0f} ms per request"

    def info_of_all() -> None:
        reader = Catalog(store)
        assert len([*each(lambda save: reader.info(save, visible=True), reader.visible())]) == num_steps

    for what, call in (
        ("latest", lambda: Catalog(store).resolve("latest")),
        ("ls", lambda: committed(Catalog(store), False)),
        ("info of all steps", info_of_all),
        ("stands of all steps, as the first sweep after a start reads them", lambda: _stands(Catalog(store))),
    ):
        began = time.perf_counter()
        with store.counted() as counts:
            call()
        figures.add(case, "ckptlib", what, "s", [time.perf_counter() - began])
        figures.add(case, "ckptlib", what, "requests", [counts[0].total])


def _stands(catalog: Catalog) -> None:
    catalog.warm_stands(catalog.saves())
