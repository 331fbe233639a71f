"""Verify finds every class of damage, names what it hurts, and finds nothing where there is none."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from helpers.objects import objects_of
from support import (
    commit_unproved,
    make_generation,
    make_root,
    make_save,
    of_version,
    put_part,
    put_parts,
    resealed,
    state,
)
from typing_extensions import Buffer, override

from ckptlib.catalog.catalog import Catalog
from ckptlib.errors import CheckpointNotFound, FormatError, ObjectNotFound, StoreError
from ckptlib.format import keys
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.keys import SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.part import Part
from ckptlib.format.table import Table
from ckptlib.format.tagged_values import MAX_DEPTH
from ckptlib.format.values import Json
from ckptlib.format.values import decode as decode_value
from ckptlib.stores import Store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import FaultStore, _HookedStore
from ckptlib.verify import packs
from ckptlib.verify.findings import Finding
from ckptlib.verify.root import verify_root, verify_save

T = TypeVar("T")

RANKS = 2


def tensors() -> dict[str, np.ndarray]:
    """Small ones, one of several chunks, and enough slack between."""
    large = np.random.default_rng(0).random((2 * 7, 50_000), dtype=np.float32)
    return {**state(5), "large": large}


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def save(store: MemoryStore) -> SaveId:
    catalog = make_root(store)
    return make_save(catalog, make_generation(catalog, world_size=RANKS), 5, tensors(), RANKS)


def findings(store: Store, save: SaveId) -> list[Finding]:
    """All of a root with one step."""
    catalog = Catalog(store)
    return [*verify_root(catalog), *verify_save(catalog, save)]


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def alter(store: MemoryStore, key: str, change: Callable[[bytes], bytes]) -> None:
    data, modified = objects_of(store)[key]
    objects_of(store)[key] = (change(data), modified)


def flip(at: int, mask: int = 1) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]


def parts_of(store: Store, save: SaveId) -> list[Part]:
    catalog = Catalog(store)
    return [catalog.part(name) for name in catalog.manifest(save).parts]


def test_what_is_whole_is_good(store: MemoryStore, save: SaveId) -> None:
    assert findings(store, save) == []


def test_progress_adds_up_to_the_size_in_the_manifest(store: MemoryStore, save: SaveId) -> None:
    told: list[int] = []
    catalog = Catalog(store)
    assert list(verify_save(catalog, save, told.append)) == []
    assert sum(told) == catalog.manifest(save).nbytes
    assert min(told) > 0


def test_every_byte_of_every_document_counts(store: MemoryStore, save: SaveId) -> None:
    documents = [key for key in objects_of(store) if key.endswith(".json")]
    assert {key.split("/")[0] for key in documents} == {"ckptlib.json", "generations", "layouts", "parts", "steps"}
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
            alter(store, key, lambda data: of_version(data, 2))
            found = only(findings(store, save))
            assert (found.damage, found.key) == ("newer", key)
            assert "update ckptlib" in found.message
        alter(store, key, lambda data, whole=original: whole.replace(b'"ckptlib":1', b'"ckptlib":3', 1))
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
            found = findings(store, save)
            assert ("missing", key) in {(one.damage, one.key) for one in found}
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


# -- documents that are sealed, and lie


def nested(levels: int, kind: str) -> Json:
    value: Json = 0
    for _ in range(levels):
        value = [value] if kind == "list" else {"a": value} if kind == "dict" else {kind: [value]}
    return value


def reseal(store: MemoryStore, key: str, **fields: object) -> None:
    alter(store, key, lambda data: resealed(data, **fields))


@pytest.mark.parametrize("field", [{"nbytes": 1}, {"created": 1.0}, {"metrics": {"loss": 0}}])
def test_manifest_that_is_not_that_of_its_parts(store: MemoryStore, save: SaveId, field: dict[str, object]) -> None:
    reseal(store, save.manifest_key, **field)
    found = only(findings(store, save))
    assert (found.damage, found.key) == ("malformed", save.manifest_key)


def test_generation_under_another_name(store: MemoryStore, save: SaveId) -> None:
    reseal(store, save.generation.key, generation=2)
    found = only(findings(store, save))
    assert (found.damage, found.key) == ("malformed", save.generation.key)


@pytest.mark.parametrize(
    "value",
    [
        *(pytest.param(nested(MAX_DEPTH + 1, kind), id=f"deep-{kind}") for kind in ("list", "dict", "$tuple")),
        pytest.param({"$set": [1, 1]}, id="twice"),
        pytest.param({"$later": 1}, id="tag"),
        pytest.param(2**60, id="rounded"),
    ],
)
def test_values_that_no_load_takes(store: MemoryStore, save: SaveId, value: Json) -> None:
    with pytest.raises(FormatError):
        decode_value(value)
    parts = parts_of(store, save)
    store.delete(save.manifest_key)
    lying = replace(parts[1], values={"good": [1], "bad": value})
    name, document = lying.encode()
    store.put(name.key, document)
    commit_unproved(store, save, [parts[0].encode()[0], name])
    found = only(findings(store, save))
    assert (found.damage, found.key, found.rank) == ("malformed", name.key, 1)
    assert name.key in found.message
    assert "bad" in found.message


def test_values_as_deep_as_they_may_be(store: MemoryStore, save: SaveId) -> None:
    parts = parts_of(store, save)
    store.delete(save.manifest_key)
    name, document = replace(parts[1], values={"deep": nested(MAX_DEPTH, "list")}).encode()
    store.put(name.key, document)
    commit_unproved(store, save, [parts[0].encode()[0], name])
    assert findings(store, save) == []


def without_first_shard(part: Part) -> Part:
    table = part.table
    first = table.num_chunks[0]
    cut = Table(
        table.layout,
        table.tensors[1:],
        table.boxes[1:],
        table.num_chunks[1:],
        table.packs[first:],
        table.offsets[first:],
        table.nbytes[first:],
    )
    return replace(part, table=cut, digests=part.digests[first:])


def test_elements_that_no_part_holds(store: MemoryStore, save: SaveId) -> None:
    catalog = Catalog(store)
    other, names = put_parts(catalog, save.generation, 6, tensors(), RANKS)
    name, document = without_first_shard(Part.decode(names[1], store.get(names[1].key))).encode()
    store.put(name.key, document)
    commit_unproved(store, other, [names[0], name])
    found = list(verify_save(Catalog(store), other))
    assert {one.damage for one in found} == {"incomplete", "malformed"}  # and the header tells of more than the part
    assert "no part of step 6 holds these elements" in found[0].message


def by_hand(boxes: list[list[Box]], values: list[float]) -> tuple[MemoryStore, SaveId]:
    """A step with one tensor of 4 x 4 that ranks cut by hand; rank i saves `values[i]` everywhere."""
    store = MemoryStore()
    catalog = make_root(store)
    save = SaveId(1, make_generation(catalog, world_size=len(boxes)))
    layout = Layout(len(boxes), (TensorEntry("x", "float32", (4, 4), ByHand()),))
    names = []
    for rank, mine in enumerate(boxes):
        whole = np.full((4, 4), values[rank], dtype=np.float32)
        names.append(put_part(catalog, save, rank, layout, {"x": whole}, shards=[("x", box) for box in mine]))
    commit_unproved(store, save, names)
    return store, save


LEFT, RIGHT, MIDDLE = Box((0, 0), (4, 2)), Box((0, 2), (4, 2)), Box((0, 1), (4, 2))


def test_boxes_by_hand_that_fit(store: MemoryStore) -> None:
    store, save = by_hand([[LEFT, RIGHT], [RIGHT]], [1.0, 1.0])
    assert findings(store, save) == []


def test_replicas_that_differ(store: MemoryStore) -> None:
    store, save = by_hand([[LEFT, RIGHT], [RIGHT]], [1.0, 2.0])
    found = only(findings(store, save))
    assert (found.damage, found.rank, found.shards) == ("incomplete", 1, (("x", RIGHT),))
    assert "ranks 0 and 1 saved different bytes" in found.message


def test_boxes_by_hand_that_overlap(store: MemoryStore) -> None:
    store, save = by_hand([[LEFT, RIGHT], [MIDDLE]], [1.0, 1.0])
    assert findings(store, save) == []
    store, save = by_hand([[LEFT, RIGHT], [MIDDLE]], [1.0, 2.0])
    found = findings(store, save)
    assert [(one.damage, one.rank) for one in found] == [("incomplete", 1)] * 2
    assert {one.shards for one in found} == {(("x", Box((0, at), (4, 1))),) for at in (1, 2)}
    assert all("ranks 0 and 1 saved different bytes" in one.message for one in found)


# -- the store


def test_what_the_store_does_not_give_is_unreadable(store: MemoryStore, save: SaveId, tmp_path: Path) -> None:
    """A bad sector: the rest of the pack is judged all the same."""
    part = parts_of(store, save)[1]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"op": "get_into", "key": part.packs[0].key, "action": "error"}]))
    found = findings(FaultStore(store, str(plan)), save)
    assert {one.damage for one in found} == {"unreadable"}
    assert {name for one in found for name, _ in one.shards} == {"w", "b", "large"}
    assert {one.rank for one in found} == {1}


def test_a_manifest_that_the_store_does_not_give(store: MemoryStore, save: SaveId, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"op": "get", "key": "^steps/", "action": "unreadable"}]))
    found = only(findings(FaultStore(store, str(plan)), save))
    assert (found.damage, found.key) == ("unreadable", save.manifest_key)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["packs", "parts", "layouts"])
def test_what_is_no_file_is_missing(tmp_path: Path, kind: str) -> None:
    """As a load finds it; neither waits for somebody to write into a FIFO, or takes what a link leads to."""
    store = LocalStore(str(tmp_path))
    catalog = make_root(store)
    save = make_save(catalog, make_generation(catalog), 5, tensors())
    path = next(p for p in (tmp_path / kind).rglob("*") if p.is_file())
    moved = path.rename(tmp_path / "moved")
    for put_there in (os.mkfifo, lambda path: path.symlink_to(moved), os.mkdir):
        put_there(path)
        found = findings(store, save)
        assert {one.damage for one in found} == {"missing"}
        assert {one.key for one in found} == {str(path.relative_to(tmp_path))}
        with pytest.raises(ObjectNotFound):
            store.get(str(path.relative_to(tmp_path)))
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_bad_sector_hurts_only_its_chunk(store: MemoryStore, save: SaveId) -> None:
    part = parts_of(store, save)[0]
    table = part.table
    bad = table.offsets[table.first_chunks[table.boxes.index(Box((0, 0), (3, 4)))]]
    found = only(findings(BadSector(store, part.packs[0].key, bad), save))
    assert (found.damage, found.offset) == ("unreadable", bad)
    assert ("w", Box((0, 0), (3, 4))) in found.shards
    assert "large" not in {name for name, _ in found.shards}


def test_outage_is_no_damage(store: MemoryStore, save: SaveId, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"op": "scan", "action": "error"}]))
    with pytest.raises(StoreError):
        findings(FaultStore(store, str(plan)), save)


class BadSector(_HookedStore):
    """A byte of an object cannot be read."""

    def __init__(self, inner: Store, key: str, at: int) -> None:
        super().__init__(inner, "bad")
        self._key, self._at = key, at

    @override
    def _run(self, op: str, key: str, act: Callable[[Buffer], T], data: Buffer = b"") -> T:
        return act(data)

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        if key == self._key and offset <= self._at < offset + buffer.nbytes:
            raise StoreError(f"{key}: cannot read: Input/output error (errno 5)")
        self._inner.get_into(key, offset, buffer)


class Meter(_HookedStore):
    """How much is asked for at once."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, "meter")
        self._lock = threading.Lock()
        self.largest = self.busy = self.most_busy = 0

    @override
    def _run(self, op: str, key: str, act: Callable[[Buffer], T], data: Buffer = b"") -> T:
        with self._lock:
            self.busy += 1
            self.most_busy = max(self.busy, self.most_busy)
        try:
            return act(data)
        finally:
            with self._lock:
                self.busy -= 1

    @override
    def get_into(self, key: str, offset: int, buffer: memoryview) -> None:
        self.largest = max(self.largest, buffer.nbytes)
        super().get_into(key, offset, buffer)


def test_memory_is_bounded(store: MemoryStore, save: SaveId, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "RUN_BYTES", 1 << 20)
    meter = Meter(store)
    assert findings(meter, save) == []
    assert 0 < meter.largest <= 1 << 20
    assert meter.most_busy <= packs.READ_THREADS


def test_giving_up_half_way_leaves_no_thread(store: MemoryStore, save: SaveId) -> None:
    del objects_of(store)[parts_of(store, save)[0].packs[0].key]
    found: Iterator[Finding] = verify_save(Catalog(store), save)
    next(found)
    found.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckptlib-verify")]


def test_names_are_digests_of_content(store: MemoryStore, save: SaveId) -> None:
    """A layout that is sealed well, but is another one, under this one's name."""
    digest = next(iter(Catalog(store).manifest(save).layouts))
    key = keys.layout_key(digest)
    reseal(store, key, objects={"x": 1})
    assert digester(XXH3)(store.get(key)) != digest
    assert {(one.damage, one.key) for one in findings(store, save)} == {("altered", key)}
