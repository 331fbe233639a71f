"""A root of steps that share chunks: good ones are read once, damaged ones are told for each step that needs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.findings import alter, flip, parts_of
from helpers.increments import SIDE, needed_ranges, save_steps
from helpers.objects import objects_of
from typing_extensions import override

from ckptlib.catalog.catalog import Catalog
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.format.places import Base, Coding
from ckptlib.stores import Store
from ckptlib.stores.memory import MemoryStore
from ckptlib.verify import SharedChunks, shared_chunks, verify_save
from ckptlib.verify.findings import Finding

LARGE = SIDE * SIDE * 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 to 4, of which each has `w0` of its own; not to be changed."""
    path = tmp_path_factory.mktemp("shared") / "root"
    save_steps(path, 1, 4)
    return path


class Reads(MemoryStore):
    """Tells what of packs was read."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
        self.ranges.append((key, offset, offset + len(buffer)))
        super().get_into(key, offset, buffer)


@pytest.fixture
def store(root: Path) -> Reads:
    found = Reads()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            found.put(str(path.relative_to(root)), path.read_bytes())
    return found


def verify_all(store: Store) -> dict[SaveId, list[Finding]]:
    """As the command does it. What it tells of progress is true for each step."""
    catalog = Catalog(store)
    saves = catalog.saves()
    shared = SharedChunks(catalog, saves)
    found = {}
    for save in saves:
        done: list[int] = []
        expected: list[int] = []
        found[save] = [*verify_save(catalog, save, done.append, expected.append, shared)]
        assert [sum(done)] == expected
    return found


def test_every_chunk_is_read_once(store: Reads, root: Path) -> None:
    assert [*verify_all(store).values()] == [[]] * 4
    read = {key: np.zeros(len(data), np.int64) for key, (data, _) in objects_of(store).items() if "packs/" in key}
    for key, start, stop in store.ranges:
        read[key][start:stop] += 1
    assert max(times.max() for times in read.values()) == 1
    for key, by_step in needed_ranges(root).items():
        for ranges in by_step.values():
            assert all(read[key][start:stop].all() for start, stop in ranges)


def test_each_step_alone_reads_all_of_its_own(store: Reads) -> None:
    catalog = Catalog(store)
    for save in catalog.saves():
        store.ranges.clear()
        assert [*verify_save(catalog, save)] == []
        assert sum(stop - start for _, start, stop in store.ranges) > 4 * LARGE


def place_of(part: Part, name: str, catalog: Catalog) -> tuple[str, int]:
    """Pack and offset of the first chunk of a tensor."""
    table = part.table
    chunk = table.first_chunks[table.tensors.index(catalog.layout(table.layout).index[name])]
    return part.packs[table.packs[chunk]].key, table.offsets[chunk]


def test_a_damaged_chunk_is_told_for_each_step_that_needs_it(store: Reads) -> None:
    catalog = Catalog(store)
    saves = catalog.saves()
    pack, offset = place_of(parts_of(store, saves[0])[0], "model/w2", catalog)
    own, at = place_of(parts_of(store, saves[2])[0], "model/w0", catalog)
    assert "/000000000001-" in pack
    assert "/000000000003-" in own
    alter(store, pack, flip(offset + 5))
    alter(store, own, flip(at + 5))
    found = verify_all(store)
    told = {save.step: [(one.damage, one.key, one.offset, one.save) for one in of] for save, of in found.items()}
    expected = {save.step: [("altered", pack, offset, save)] for save in saves}
    expected[3].append(("altered", own, at, saves[2]))
    assert {step: sorted(of) for step, of in told.items()} == {step: sorted(of) for step, of in expected.items()}
    assert {name for one in found[saves[3]] for name, _ in one.shards} == {"model/w2"}


def test_damage_between_two_steps_hides_nothing_that_is_read_again(store: Reads) -> None:
    """A pack that is gone is told for each step, whatever was good of it before."""
    catalog = Catalog(store)
    saves = catalog.saves()
    shared = SharedChunks(catalog, saves)
    assert [*verify_save(catalog, saves[0], shared=shared)] == []
    del objects_of(store)[parts_of(store, saves[0])[0].packs[0].key]
    assert [one.damage for one in verify_save(catalog, saves[1], shared=shared)] == ["missing"]


def test_what_is_remembered_is_bounded_and_forgotten(store: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = Catalog(store)
    saves = catalog.saves()
    shared = SharedChunks(catalog, saves)
    for save in saves:
        assert [*verify_save(catalog, save, shared=shared)] == []
    assert not shared._known
    assert shared._room == shared_chunks.MAX_CHUNKS
    monkeypatch.setattr(shared_chunks, "MAX_CHUNKS", 2)
    store.ranges.clear()
    assert [*verify_all(store).values()] == [[]] * 4
    assert sum(stop - start for _, start, stop in store.ranges) > 4 * 4 * LARGE


def test_only_chunks_that_are_judged_alike_are_the_same(store: Reads) -> None:
    catalog = Catalog(store)
    saves = catalog.saves()
    part = parts_of(store, saves[0])[0]
    pack, chunks = part.packs[0].key, [*range(len(part.table.nbytes))]
    shared = SharedChunks(catalog, saves)
    shared.add(part, pack, chunks)
    assert shared.unknown(part, pack, chunks) == chunks  # not before the end of the step
    shared.finish(saves[0])
    assert shared.unknown(part, pack, chunks) == []
    assert shared.unknown(part, pack + "x", chunks) == chunks
    for other in others(part):
        assert shared.unknown(other, pack, chunks) == [0]


def test_a_base_in_another_pack_makes_another_chunk(store: Reads) -> None:
    part = parts_of(store, Catalog(store).saves()[0])[0]
    packs = (*part.packs, *(replace(part.packs[0], key=f"{part.packs[0].key}{n}") for n in "xy"))
    bases = (Base(len(packs) - n, 4096, 8, None, "0" * 32) for n in (1, 2))
    told = [replace(part, packs=packs, codings={0: Coding("patch", 8, base)}) for base in bases]
    assert len({int(shared_chunks._numbers(one, [0])[0]) for one in told}) == 2


def others(part: Part) -> Iterator[Part]:
    """Parts of which the first chunk is to be judged otherwise."""
    table = part.table
    yield replace(part, digests=("0" * 32, *part.digests[1:]))
    yield replace(part, table=table.placed(table.packs, (table.offsets[0] + 1, *table.offsets[1:])))
    yield replace(part, table=replace(table, nbytes=(table.nbytes[0] - 1, *table.nbytes[1:])))
    stored = table.nbytes[0]
    yield replace(part, codings={0: Coding("zstd", stored)})
    yield replace(part, codings={0: Coding("patch", stored, Base(0, 4096, 8, None, "0" * 32))})
