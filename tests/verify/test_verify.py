"""Verify finds what was altered, lost or moved, names what it hurts, and finds nothing where there is nothing."""

from __future__ import annotations

import pytest
from helpers.findings import RANKS, alter, findings, flip, only, parts_of, tensors
from helpers.objects import objects_of
from support import (
    make_save,
    of_version,
    state,
)

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CheckpointNotFound
from ckptlib.format.box import Box
from ckptlib.format.keys import SaveId
from ckptlib.format.part import Part
from ckptlib.stores import Store
from ckptlib.stores.memory import MemoryStore
from ckptlib.verify.root import verify_save


def test_what_is_whole_is_good(store: MemoryStore, save: SaveId) -> None:
    assert findings(store, save) == []


def test_progress_adds_up_to_what_was_expected(store: MemoryStore, save: SaveId) -> None:
    told: list[int] = []
    expected: list[int] = []
    catalog = Catalog(store)
    assert list(verify_save(catalog, save, told.append, expected.append)) == []
    assert [sum(told)] == expected
    manifest = catalog.manifest(save)
    assert manifest.nbytes_state is not None
    assert manifest.nbytes_state < expected[0] <= manifest.nbytes
    assert min(told) > 0


def test_every_byte_of_every_document_counts(store: MemoryStore, save: SaveId) -> None:
    documents = [key for key in objects_of(store) if key.endswith(".json")]
    assert {key.split("/")[0] for key in documents} == {
        "ckptlib.json",
        "copies",
        "generations",
        "layouts",
        "parts",
        "steps",
    }
    for key in documents:
        for at in range(0, len(store.get(key)), 3):
            alter(store, key, flip(at))
            found = findings(store, save)
            assert key in {one.key for one in found}, (key, at)
            assert {one.damage for one in found} <= {"altered", "malformed"}
            alter(store, key, flip(at))
    assert findings(store, save) == []


def test_a_newer_document_is_a_finding_and_an_altered_version_another(store: MemoryStore, save: SaveId) -> None:
    for key in [key for key in objects_of(store) if key.endswith(".json")]:
        original = store.get(key)
        if "parts" not in key and "layouts" not in key:  # whose names are the digests of all of them
            alter(store, key, lambda data: of_version(data, 3))
            found = only(findings(store, save))
            assert (found.damage, found.key) == ("newer", key)
            assert "update ckptlib" in found.message
        alter(store, key, lambda data, whole=original: whole[:11] + b"3" + whole[12:])
        found = only(findings(store, save))
        assert (found.damage, found.key) == ("altered", key)
        alter(store, key, lambda data, whole=original: whole)
    assert findings(store, save) == []


def test_every_missing_object_is_named(store: MemoryStore, save: SaveId) -> None:
    for key in list(objects_of(store)):
        kept = objects_of(store).pop(key)
        if key == save.manifest_key:  # then the step does not exist
            with pytest.raises(CheckpointNotFound):
                findings(store, save)
        else:
            found = findings(store, save)  # roots of earlier versions have no copies
            assert (("missing", key) in {(one.damage, one.key) for one in found}) != key.startswith("copies/")
        objects_of(store)[key] = kept
    assert findings(store, save) == []


def test_lost_pack_names_every_tensor_in_it(store: MemoryStore, save: SaveId) -> None:
    pack = parts_of(store, save)[1].packs[0].key
    del objects_of(store)[pack]
    found = only(findings(store, save))
    assert (found.damage, found.key, found.rank, found.save) == ("missing", pack, 1, save)
    assert {name for name, _ in found.shards} == {"w", "b", "large"}
    assert ("large", Box((7, 0), (7, 50_000))) in found.shards


def test_flips_in_a_pack_are_found_where_they_are(store: MemoryStore, save: SaveId) -> None:
    """A flip in a chunk names the tensor and the range; one in the header is found; one in slack is nobody's."""
    for part in parts_of(store, save):
        table, pack = part.table, part.packs[0]
        layout = Catalog(store).layout(table.layout)
        owners: dict[range, tuple[tuple[str, Box], ...]] = {}
        for shard, (tensor, box) in enumerate(zip(table.tensors, table.boxes, strict=True)):
            for c in table.chunks(shard):
                where = range(table.offsets[c], table.offsets[c] + table.nbytes[c])
                owners[where] = (*owners.get(where, ()), (layout.tensors[tensor].name, box))
        start = min(table.offsets)
        positions = {
            0,
            7,
            8,
            start - 1,
            start,
            pack.nbytes - 1,
            *range(0, start, 97),
            *range(start, pack.nbytes, 99_991),
        }
        positions |= {edge for span in owners for edge in (span.start, span.stop - 1, span.stop)} - {pack.nbytes}
        for at in sorted(positions):
            alter(store, pack.key, flip(at, 0x10))
            found = findings(store, save)
            span = next((span for span in owners if at in span), None)
            if span is not None:
                one = only(found)
                assert (one.damage, one.rank, one.shards) == ("altered", part.rank, owners[span])
                assert (one.key, one.offset, one.nbytes) == (pack.key, span.start, len(span))
                assert all(
                    text in one.message
                    for text in (*owners[span][0][0], str(owners[span][0][1]), pack.key, f"rank {part.rank}")
                )
            elif at < start:
                assert [one.damage for one in found] == ["malformed"]
                assert only(found).key == pack.key
            else:
                assert found == []
            alter(store, pack.key, flip(at, 0x10))


def test_damaged_chunks_of_a_shard_are_one_finding(store: MemoryStore, save: SaveId) -> None:
    part = parts_of(store, save)[0]
    shard = part.table.boxes.index(Box((0, 0), (7, 50_000)))
    first = part.table.first_chunks[shard]
    assert part.table.num_chunks[shard] == 4
    for chunk in (first, first + 3):
        alter(store, part.packs[0].key, flip(part.table.offsets[chunk] + 5))
    found = only(findings(store, save))
    assert found.nbytes == 7 * 50_000 * 4
    assert "2 of 4 chunks" in found.message


@pytest.mark.parametrize("cut", [1, 5000, 1_000_000, 2_000_000])
def test_cut_pack(store: MemoryStore, save: SaveId, cut: int) -> None:
    part = parts_of(store, save)[0]
    size = max(0, part.packs[0].nbytes - cut)
    alter(store, part.packs[0].key, lambda data: data[:size])
    found = only(findings(store, save))
    assert (found.damage, found.key, found.rank) == ("malformed", part.packs[0].key, 0)
    assert {*found.shards} == shards_behind(store, part, size)


def shards_behind(store: Store, part: Part, size: int) -> set[tuple[str, Box]]:
    """Those with a chunk that ends behind `size`."""
    table, layout = part.table, Catalog(store).layout(part.table.layout)
    return {
        (layout.tensors[table.tensors[shard]].name, table.boxes[shard])
        for shard in range(len(table.tensors))
        if any(table.offsets[c] + table.nbytes[c] > size for c in table.chunks(shard))
    }


def test_grown_pack(store: MemoryStore, save: SaveId) -> None:
    pack = parts_of(store, save)[0].packs[0]
    alter(store, pack.key, lambda data: data + b"\0")
    found = only(findings(store, save))
    assert (found.damage, found.key, found.shards) == ("malformed", pack.key, ())


def test_pack_of_another_step_in_its_place(store: MemoryStore, save: SaveId) -> None:
    """It is whole, has the same shape, and safetensors opens it."""
    catalog = Catalog(store)
    other = make_save(catalog, save.generation, 6, {**tensors(), **state(6)}, RANKS)
    here, there = parts_of(store, save)[0].packs[0], parts_of(store, other)[0].packs[0]
    assert here.nbytes == there.nbytes
    alter(store, here.key, lambda data: store.get(there.key))
    found = findings(store, save)
    assert "malformed" in {one.damage for one in found}  # the header names the other save
    assert {"w", "b"} <= {name for one in found for name, _ in one.shards} <= {"w", "b", "count"}
    assert findings(store, other) == []
