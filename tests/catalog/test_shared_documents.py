"""What all steps need is there twice: the root's document, and the layouts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import make_generation, make_save, of_version, put_parts, replace_object, state

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.errors import CheckpointNotFound, NewerFormat, StoreError
from ckptlib.format import keys
from ckptlib.format.manifest import Root
from ckptlib.stores import Store
from ckptlib.stores.testing import FaultStore
from ckptlib.verify.root import verify_root


def test_copies_are_there_before_the_step(store: Store, catalog: Catalog, tmp_path: Path) -> None:
    """Of a size that is wrong, or gone with a layout that retention took too early, they come again."""
    root = store.get(keys.ROOT)
    generation = make_generation(catalog)
    plan = tmp_path / "plan.json"
    plan.write_text("[]")
    save, names = put_parts(catalog, generation, 10, state(10))
    Committer(Catalog(FaultStore(store, str(plan)))).commit(save, names)
    log = [json.loads(line) for line in (tmp_path / "plan.json.log").read_text().splitlines()]
    layout = next(iter(catalog.manifest(save).layouts))
    copies = [keys.copy_key(keys.ROOT), keys.copy_key(keys.layout_key(layout))]
    assert [line["key"] for line in log if line["op"] == "put"] == [*copies, save.manifest_key]
    assert [store.get(key) for key in copies] == [root, store.get(keys.layout_key(layout))]
    replace_object(store, copies[0], root[:-1])
    store.delete(copies[1], keys.layout_key(layout))
    save, names = put_parts(catalog, generation, 11, state(11))
    Committer(Catalog(store)).commit(save, names)
    assert [store.get(key) for key in copies] == [root, store.get(keys.layout_key(layout))]


def test_a_step_is_committed_without_the_document_of_its_root(store: Store, catalog: Catalog) -> None:
    generation = make_generation(catalog)
    store.delete(keys.ROOT)
    save = make_save(Catalog(store), generation, 10, state(10))
    assert catalog.saves() == [save]
    with pytest.raises(CheckpointNotFound):
        catalog.root()
    make_save(catalog, generation, 11, state(11))
    assert Catalog(store).root() == catalog.root(), "who has read it puts its copy"


def test_a_newer_document_of_the_root_is_not_passed_over(store: Store, catalog: Catalog) -> None:
    make_save(catalog, make_generation(catalog), 10, state(10))
    replace_object(store, keys.ROOT, of_version(store.get(keys.ROOT), 3))
    with pytest.raises(NewerFormat):
        Catalog(store).root()
    with pytest.raises(NewerFormat):
        Catalog(store).open_root(Root("0" * 32, "xxh3", 1.0))


def test_a_copy_that_cannot_be_put_leaves_no_step(store: Store, catalog: Catalog, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps([{"op": "put", "key": "^copies/", "action": "error"}]))
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10))
    with pytest.raises(StoreError, match="as planned"):
        Committer(Catalog(FaultStore(store, str(plan)))).commit(save, names)
    assert catalog.saves() == []
    Committer(Catalog(store)).commit(save, names)
    assert catalog.saves() == [save]


def test_a_damaged_copy_that_is_deleted_comes_again(store: Store, catalog: Catalog) -> None:
    """As the page of `ckptlib verify` says."""
    generation = make_generation(catalog)
    make_save(catalog, generation, 10, state(10))
    copy = keys.copy_key(keys.ROOT)
    replace_object(store, copy, store.get(copy)[:-9] + b"#" + store.get(copy)[-8:])
    assert [finding.key for finding in verify_root(Catalog(store))] == [copy]
    store.delete(copy)
    make_save(Catalog(store), generation, 11, state(11))
    assert store.get(copy) == store.get(keys.ROOT)
    assert [*verify_root(Catalog(store))] == []
