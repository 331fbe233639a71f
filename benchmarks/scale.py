"""What does a save cost at 1,024 ranks and 3,000 tensors? CPU seconds of planning and committing, sizes of documents.

The same at 16,384 ranks and 60 tensors. No ranks run: their documents are made one after another, and put into a store
in memory. So what is measured is the work that grows with ranks and tensors, without any network.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.figures import Figures, Options, run
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.format import body_layout, gc_pause, sharding
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, PartName, SaveId
from ckptlib.format.layout import Layout, Mesh, Placed, TensorSpec
from ckptlib.format.manifest import Generation, Manifest, Root
from ckptlib.format.part import Pack, Part
from ckptlib.format.sharding import Shard
from ckptlib.loading.reader import Reader
from ckptlib.reading.committed import Committed
from ckptlib.reading.reader import Want
from ckptlib.saving.assign import assign
from ckptlib.stores.memory import MemoryStore

GENERATION = GenerationId(1, "0" * 8)
ATTEMPT = "0" * 8
ROWS = 4
"""Of each tensor, per rank."""


def main(arguments: list[str]) -> None:
    run(arguments, "scale", measure, gb=0.0)


def measure(options: Options, directory: Path, figures: Figures) -> None:
    for num_ranks, num_tensors in ((8, 50),) if options.toy else ((1024, 3000), (16384, 60)):
        _measure(num_ranks, num_tensors, options, figures)


def _measure(num_ranks: int, num_tensors: int, options: Options, figures: Figures) -> None:
    case = f"{num_ranks:,} ranks, {num_tensors:,} tensors"

    def note(what: str, unit: str, sample: float) -> None:
        figures.add(case, "ckptlib", what, unit, [sample], ranks=num_ranks, tensors=num_tensors)

    store = MemoryStore("scale")
    catalog = Catalog(store)
    committer = Committer(catalog)
    catalog.open_root(Root("0" * 32, XXH3, 3600.0))
    catalog.generations.put(Generation(GENERATION, num_ranks, None, 0.0, {}, "here"))
    layout, seconds = _timed(lambda: layout_of(num_ranks, num_tensors))
    note("layout, once per layout", "cpu s", seconds)
    note("layout", "KB", len(layout.encoded) / 1e3)
    catalog.shared.put_layout(layout.digest, layout.encoded)

    first, names, parts = SaveId(1, GENERATION), [], []
    for rank in range(num_ranks):
        part, seconds = _timed(lambda rank=rank: part_of(first, rank, layout))
        parts.append(part if rank == 0 else None)
        names.append(_put(store, part))
        if rank < 3:
            note("plan and part of a rank, first save", "cpu s", seconds)
    note("part", "KB", len(store.get(names[0].key)) / 1e3)
    gc.freeze()  # the writer, which commits, has neither torch's million objects to search for garbage, nor these parts
    _, seconds = _timed(lambda: committer.commit_when_whole(first, num_ranks, lambda: 60.0))
    note("first commit, rank 0", "cpu s", seconds)

    for step in range(2, 2 + options.rounds):
        save = SaveId(step, GENERATION)
        assert parts[0] is not None
        _put(store, replace(parts[0], save=save))
        for name in names[1:]:  # only their names are looked at
            store.put(replace(name, save=save).key, b"")
        manifest, seconds = _timed(lambda save=save: committer.commit_when_whole(save, num_ranks, lambda: 60.0))
        note("steady commit, rank 0", "cpu s", seconds)
    note("manifest", "KB", len(store.get(manifest.save.manifest_key)) / 1e3)

    gc.unfreeze()
    manifest = catalog.manifest(first)
    for loading in (num_ranks, num_ranks * 3 // 4, 8):
        for rank in (0, loading // 2):
            _, seconds = _timed(lambda ranks=loading, rank=rank: _plan_load(store, manifest, rank, ranks))
            note(f"load planning, {loading} ranks", "cpu s", seconds)


T = TypeVar("T")


def _timed(function: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    found = function()
    return found, time.process_time() - began


def layout_of(num_ranks: int, num_tensors: int) -> Layout:
    """Tensors of a large model under FSDP: cut along dim 0 over all ranks."""
    held = Placed(Mesh((num_ranks,), tuple(range(num_ranks))), (Shard(0),), None)
    names = sorted(f"{kind}/layers.{i}.weight" for i in range(num_tensors // 3 + 1) for kind in ("model", "m", "v"))
    shape = (ROWS * num_ranks, 1024)
    tensors = [TensorSpec(name, "float32", shape) for name in names[:num_tensors]]
    layout = Layout(num_ranks, tuple(assign(tensors, dict.fromkeys(names, held))))
    assert layout.digest
    return layout


def _boxes(layout: Layout, rank: int, num_ranks: int) -> Iterator[tuple[str, Box]]:
    for entry in layout.tensors:
        assert isinstance(entry.holding, Placed)
        for piece in sharding.pieces(entry.shape, (num_ranks,), entry.holding.placements, (rank,)):
            yield entry.name, piece.box


def part_of(save: SaveId, rank: int, layout: Layout) -> Part:
    """As a rank makes it; its digests are zeroes."""
    table = body_layout.lay_out(layout, list(_boxes(layout, rank, layout.world_size)))
    packs = (Pack(save.pack_key(rank, ATTEMPT, 0), body_layout.body_nbytes(table), 0.0),)
    digests = ("0" * 32,) * len(table.nbytes)
    return Part(save, rank, layout.world_size, ATTEMPT, table, packs, XXH3, digests, {}, {}, 0.0)


def _put(store: MemoryStore, part: Part) -> PartName:
    name, document = part.encode()
    store.put(name.key, document)
    return name


def _plan_load(store: MemoryStore, manifest: Manifest, rank: int, num_ranks: int) -> int:
    """Documents included: what a rank does before it reads a byte of a pack."""
    reader = Reader(Committed(Catalog(store), manifest), rank)
    layout = next(iter(reader.layouts.values()))
    wants = [
        Want(name, ((box, torch.empty(box.shape, device="meta")),)) for name, box in _boxes(layout, rank, num_ranks)
    ]
    with gc_pause.kept():
        return len(reader._plan(wants, [reader.ranks_for(want) for want in wants]))
