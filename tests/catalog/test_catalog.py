"""What a root holds: what is listed, read, and on the history of the job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import (
    flips,
    layout_of,
    make_generation,
    make_save,
    replace_object,
    state,
)

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.finishing import finish_saves
from ckptlib.errors import (
    CheckpointNotFound,
    CorruptData,
    ObjectNotFound,
    SaveFailed,
    StoreError,
    describe,
)
from ckptlib.format import keys
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Root
from ckptlib.stores import Store
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import FaultStore, write_plan


def test_an_empty_store_is_no_root(store: Store) -> None:
    catalog = Catalog(store)
    with pytest.raises(CheckpointNotFound, match=r"no ckptlib\.json"):
        catalog.root()
    assert (catalog.saves(), catalog.visible(), catalog.generations.ids()) == ([], [], [])
    with pytest.raises(CheckpointNotFound, match="no committed step"):
        catalog.resolve("latest")


def test_the_first_root_stands(store: Store) -> None:
    first, second = Root("1" * 32, "xxh3", 60.0), Root("2" * 32, "blake3", 90.0)
    assert Catalog(store).open_root(first) == first
    assert Catalog(store).open_root(second) == first


def test_an_outage_is_not_an_empty_root(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "scan", "action": "error"}, {"op": "get", "action": "error"}])
    catalog = Catalog(FaultStore(MemoryStore(), str(plan)))
    for ask in (
        catalog.root,
        catalog.saves,
        catalog.visible,
        catalog.next_generation,
        lambda: catalog.resolve("latest"),
    ):
        with pytest.raises(StoreError) as caught:
            ask()
        assert not isinstance(caught.value, ObjectNotFound)


def test_resolve_says_which_steps_there_are(catalog: Catalog) -> None:
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in (10, 20)]
    second = make_generation(catalog, 2, resumed_from=saves[0])
    newest = make_save(catalog, second, 15, state(15))
    assert catalog.resolve("latest") == newest
    assert catalog.resolve(10) == catalog.resolve("10") == saves[0]
    assert catalog.resolve(str(saves[1])) == saves[1], "left behind, but there by its name"
    with pytest.raises(CheckpointNotFound, match="no step 20; the last ones are: 10, 15"):
        catalog.resolve(20)
    with pytest.raises(CheckpointNotFound, match="no save"):
        catalog.resolve(str(SaveId(99, first)))
    with pytest.raises(CheckpointNotFound, match="neither a step's number"):
        catalog.resolve("../x")
    with pytest.raises(CheckpointNotFound):
        catalog.manifest(SaveId(99, first))


def test_strangers_in_the_root_are_not_listed(store: Store, catalog: Catalog) -> None:
    save = make_save(catalog, make_generation(catalog), 10, state(10))
    for key in ("steps/notes.txt", "steps/10.json", f"steps/{save}.json.bak", "generations/x.json", "parts/a/b.json"):
        store.put(key, b"?")
    assert catalog.saves() == [save]
    assert len(catalog.generations.ids()) == 1
    assert finish_saves(catalog, GenerationId(9, "0" * 8)) == []


def test_info(catalog: Catalog) -> None:
    save = make_save(catalog, make_generation(catalog), 10, state(10), world_size=2)
    info = catalog.info(save, visible=True)
    assert (info.step, info.generation, info.world_size, info.name, info.visible) == (10, 1, 2, str(save), True)
    assert info.nbytes == sum(entry.nbytes for entry in catalog.store.scan(keys.PACKS))


def test_a_layout_that_is_not_what_its_name_says_is_refused(store: Store, catalog: Catalog) -> None:
    layout = layout_of(state(1))
    catalog.shared.put_layout(layout.digest, layout.encoded)
    catalog.shared.put_layout(layout.digest, layout.encoded)
    assert Catalog(store).layout(layout.digest) == layout
    for _, data in list(flips(layout.encoded))[::97]:
        replace_object(store, keys.layout_key(layout.digest), data)
        with pytest.raises(CorruptData, match="does not match the digest in its name"):
            Catalog(store).layout(layout.digest)
    store.delete(keys.layout_key(layout.digest))
    with pytest.raises(ObjectNotFound):
        Catalog(store).layout(layout.digest)


def test_a_damaged_generation_hides_no_steps_but_says_so(
    store: Store, catalog: Catalog, caplog: pytest.LogCaptureFixture
) -> None:
    generation = make_generation(catalog)
    save = make_save(catalog, generation, 10, state(10))
    for key in (generation.key, keys.copy_key(generation.key)):
        assert Catalog(store).generations.record(generation).id == generation
        replace_object(store, key, store.get(key)[:-5])
    assert Catalog(store).visible() == [save]
    assert str(generation) in caplog.text
    with pytest.raises(CorruptData, match=str(generation)):
        Catalog(store).generations.record(generation)


def test_a_damaged_layout_is_put_again(store: Store, catalog: Catalog) -> None:
    """It is shared by every step that has it, so a save that has it at hand mends them all."""
    save = make_save(catalog, make_generation(catalog), 10, state(10))
    digest, layout = next((d, catalog.layout(d)) for d in catalog.manifest(save).layouts)
    key = keys.layout_key(digest)
    for at in (key, keys.copy_key(key)):
        assert Catalog(store).layout(digest) == layout
        replace_object(store, at, store.get(at)[:-5])
    with pytest.raises(CorruptData):
        Catalog(store).layout(digest)
    catalog.shared.put_layout(digest, layout.encoded)
    assert Catalog(store).layout(digest) == layout


def test_a_layout_that_cannot_be_read_is_put_again(store: Store, catalog: Catalog, tmp_path: Path) -> None:
    save = make_save(catalog, make_generation(catalog), 10, state(10))
    digest, layout = next((d, catalog.layout(d)) for d in catalog.manifest(save).layouts)
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "get", "key": "^layouts/", "action": "unreadable"}])
    faulty = FaultStore(store, str(plan))
    Catalog(faulty).shared.put_layout(digest, layout.encoded)
    log = [json.loads(line) for line in (tmp_path / "plan.json.log").read_text().splitlines()]
    assert [line["op"] for line in log] == ["get", "delete", "put"]
    assert Catalog(store).layout(digest) == layout
    write_plan(plan, [{"op": "get", "key": "^layouts/", "action": "error"}])
    with pytest.raises(StoreError, match="as planned"):  # that is the store's own trouble
        Catalog(faulty).shared.put_layout(digest, layout.encoded)
    assert Catalog(store).layout(digest) == layout


def test_a_record_that_is_lost_or_cannot_be_read_ends_history_and_says_so(
    store: Store, catalog: Catalog, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_generation(catalog, 1)
    old = make_save(catalog, first, 10, state(10))
    second = make_generation(catalog, 2, resumed_from=old)
    new = make_save(catalog, second, 20, state(20))
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "get", "key": str(second), "action": "unreadable"}])
    assert Catalog(FaultStore(store, str(plan))).visible() == [new]
    assert f"what generation {second} resumed from is not known" in caplog.text
    caplog.clear()
    store.delete(keys.copy_key(second.key))
    replace_object(store, second.key, store.get(first.key))
    assert Catalog(store).visible() == [new]
    assert "content and name tell of different generations" in caplog.text
    caplog.clear()
    store.delete(second.key)
    assert Catalog(store).visible() == [new]
    assert f"{second.key}: no such object" in caplog.text


def test_generations_count_up_also_where_only_their_steps_are_left(store: Store, catalog: Catalog) -> None:
    assert catalog.next_generation().number == 1
    generation = make_generation(catalog, 7)
    assert catalog.next_generation().number == 8
    make_save(catalog, generation, 1, state(1))
    store.delete(generation.key)
    assert Catalog(store).next_generation().number == 8


def test_describe_is_one_line_of_json() -> None:
    assert describe(SaveFailed("step 5: x")) == "step 5: x"
    assert describe(ZeroDivisionError("by 0")) == "ZeroDivisionError: by 0"
    assert len(describe(SaveFailed("x" * 9999))) == 2000
