"""Documents whose digests fit, and which say what is not so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.findings import RANKS, findings, only, parts_of, reseal, tensors
from support import (
    commit_unproved,
    make_generation,
    make_root,
    put_part,
    put_parts,
)

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.errors import FormatError
from ckptlib.format import keys
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3, digester
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.layout import ByHand, Layout, TensorEntry
from ckptlib.format.part import Part
from ckptlib.format.table import Table
from ckptlib.format.tagged_values import MAX_DEPTH
from ckptlib.format.values import Json
from ckptlib.format.values import decode as decode_value
from ckptlib.stores.memory import MemoryStore
from ckptlib.verify.root import verify_save


def nested(levels: int, kind: str) -> Json:
    value: Json = 0
    for _ in range(levels):
        value = [value] if kind == "list" else {"a": value} if kind == "dict" else {kind: [value]}
    return value


@pytest.mark.parametrize(
    "field", [{"nbytes": 1}, {"created": 1.0}, {"metrics": {"loss": 0}}, {"exempt": True}, {"account": {"x": 1}}]
)
def test_manifest_that_is_not_that_of_its_parts(store: MemoryStore, save: SaveId, field: dict[str, object]) -> None:
    reseal(store, save.manifest_key, **field)
    found = only(findings(store, save))
    assert (found.damage, found.key) == ("malformed", save.manifest_key)


def test_generation_under_another_name(store: MemoryStore, save: SaveId) -> None:
    reseal(store, save.generation.key, generation=2)
    found = only(findings(store, save))
    assert (found.damage, found.key) == ("malformed", save.generation.key)


def test_a_generation_that_was_gone_on_from_and_has_no_record(store: MemoryStore, save: SaveId) -> None:
    """History ends with it, though it has no steps that are left."""
    before = GenerationId(0, "0badcafe")
    for key in (save.generation.key, keys.copy_key(save.generation.key)):
        reseal(store, key, resumed_from=str(SaveId(3, before)))
    found = only(findings(store, save))
    assert (found.damage, found.key) == ("missing", before.key)


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


def test_a_shard_of_no_elements(store: MemoryStore) -> None:
    """It lies in the chunk of the shard before it, if anywhere. No such step is committed."""
    catalog = make_root(store)
    save = SaveId(1, make_generation(catalog))
    layout = Layout(1, (TensorEntry("w", "float32", (4, 4), ByHand()), TensorEntry("z", "float32", (0, 4), ByHand())))
    good = put_part(catalog, save, 0, layout, {"w": np.ones((4, 4), np.float32)}, shards=[("w", Box((0, 0), (4, 4)))])
    part = catalog.part(good)
    whole = part.table
    table = replace(whole, tensors=(0, 1), boxes=(*whole.boxes, Box((0, 0), (0, 4))), num_chunks=(1, 0))
    name, document = replace(part, table=table, attempt="b77e3b70").encode()
    store.put(name.key, document)
    with pytest.raises(FormatError, match=r"z\[0:0, 0:4\] is a shard of no elements"):
        Committer(Catalog(store)).commit(save, [name])
    assert Catalog(store).saves() == []
    commit_unproved(store, save, [name])
    found = only(findings(store, save))
    assert (found.damage, found.key, found.rank) == ("malformed", name.key, 0)
    store.delete(save.manifest_key)
    Committer(Catalog(store)).commit(save, [good])
    assert findings(store, save) == []


def test_names_are_digests_of_content(store: MemoryStore, save: SaveId) -> None:
    """A layout that is sealed well, but is another one, under this one's name."""
    digest = next(iter(Catalog(store).manifest(save).layouts))
    key = keys.layout_key(digest)
    reseal(store, key, objects={"x": 1})
    assert digester(XXH3)(store.get(key)) != digest
    assert {(one.damage, one.key) for one in findings(store, save)} == {("altered", key)}
