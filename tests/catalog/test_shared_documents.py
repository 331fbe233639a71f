"""What many steps need is there twice: the root's document, the layouts, and the records of generations."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.actors import ActorStore
from helpers.servers import ObjectStorage
from support import (
    listed_steps_are_whole,
    make_generation,
    make_root,
    make_save,
    of_version,
    put_parts,
    replace_object,
    resealed,
    state,
)

from ckptlib.catalog import shared_documents
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.local_disk import open_disk
from ckptlib.catalog.shared_documents import SharedDocuments
from ckptlib.errors import CheckpointNotFound, CorruptData, FormatError, NewerFormat, StoreError
from ckptlib.format import keys
from ckptlib.format.manifest import Root
from ckptlib.stores import Store, open_store
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import FaultStore, write_plan
from ckptlib.verify.findings import Finding
from ckptlib.verify.root import verify_root, verify_save


def test_copies_are_there_before_the_step(store: Store, catalog: Catalog, tmp_path: Path) -> None:
    """Of a size that is wrong, or gone with a layout that retention took too early, they come again."""
    root = store.get(keys.ROOT)
    generation = make_generation(catalog)
    plan = tmp_path / "plan.json"
    write_plan(plan, [])
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


def test_a_root_that_was_there_is_not_called_one_that_never_was(store: Store, catalog: Catalog) -> None:
    """As where another bucket has its name: who opened it, as a job's writer that has yet to read it, is told so."""
    writer, other = Catalog(store), Catalog(store)
    writer.shared.opened_id = catalog.root().id
    store.delete(keys.ROOT, keys.copy_key(keys.ROOT))
    for who in (writer, catalog):
        with pytest.raises(CheckpointNotFound, match=r"is not there any more: it has no ckptlib\.json, which it had"):
            who.root()
    with pytest.raises(CheckpointNotFound, match=r"holds no checkpoints: there is no ckptlib\.json"):
        other.root()


def test_a_newer_document_of_the_root_is_not_passed_over(store: Store, catalog: Catalog) -> None:
    make_save(catalog, make_generation(catalog), 10, state(10))
    replace_object(store, keys.ROOT, of_version(store.get(keys.ROOT), 3))
    with pytest.raises(NewerFormat):
        Catalog(store).root()
    with pytest.raises(NewerFormat):
        Catalog(store).open_root(Root("0" * 32, "xxh3", 1.0))


@pytest.mark.parametrize("cut", [0, 40])
def test_a_damaged_document_of_a_root_without_a_step_is_told_with_a_way_out(
    store: Store, catalog: Catalog, tmp_path: Path, cut: int
) -> None:
    """A new one has another id, by which the steps on local disks, which the store has not got yet, are not found."""
    root, local = catalog.root(), tmp_path / "local"
    open_disk(str(local), root, store)
    replace_object(store, keys.ROOT, store.get(keys.ROOT)[:cut])
    ways = r"no step yet: delete .*ckptlib\.json, and start the job again\. But if local= .* put the ckptlib\.json of"
    with pytest.raises((CorruptData, FormatError), match=ways):
        Catalog(store).open_root(Root("0" * 32, "xxh3", 1.0))
    replace_object(store, keys.ROOT, (local / keys.ROOT).read_bytes())
    assert Catalog(store).open_root(Root("0" * 32, "xxh3", 1.0)) == root
    store.delete(keys.ROOT)
    assert Catalog(store).open_root(Root("0" * 32, "xxh3", 1.0)).id == "0" * 32


def test_a_copy_that_cannot_be_put_leaves_no_step(store: Store, catalog: Catalog, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "put", "key": "^copies/", "action": "error"}])
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10))
    with pytest.raises(StoreError, match="as planned"):
        Committer(Catalog(FaultStore(store, str(plan)))).commit(save, names)
    assert catalog.saves() == []
    Committer(Catalog(store)).commit(save, names)
    assert catalog.saves() == [save]


def test_what_a_sweep_deletes_right_before_the_manifest_comes_again(store: Store, catalog: Catalog) -> None:
    """It has listed the steps before, and none named this layout: without both, the step would not load."""
    save, names = put_parts(catalog, make_generation(catalog), 10, state(10))
    (layout,) = sorted_keys(store, "layouts/")
    document = store.get(layout)

    def sweep(op: str, key: str) -> None:
        if (op, key) == ("put", save.manifest_key):
            store.delete(layout, keys.copy_key(layout))

    overtaken = ActorStore(store)  # type: ignore[arg-type]
    overtaken.before = sweep
    Committer(Catalog(overtaken)).commit(save, names)
    assert [store.get(key) for key in (layout, keys.copy_key(layout))] == [document, document]
    assert listed_steps_are_whole(store) == [10]


def shared_keys(store: Store) -> list[str]:
    """Of all documents that are there twice: the first ones."""
    return [key for prefix in ("ckptlib.json", "generations/", "layouts/") for key in sorted_keys(store, prefix)]


def sorted_keys(store: Store, prefix: str) -> list[str]:
    return sorted(entry.key for entry in store.scan("") if entry.key.startswith(prefix))


def damaged(data: bytes) -> Iterator[bytes]:
    """A bit of each kind: of the envelope, the digest, the body, the end; cut, empty, long, and of another document."""
    for bit, at in enumerate((0, 3, 11, 40, len(data) // 2, len(data) - 3, len(data) - 1)):
        yield data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    yield from (data[:-1], b"", data + b"\n", data * 1000, b"\0" * len(data))


@pytest.fixture
def filled(store: Store) -> Store:
    fill(store)
    return store


def fill(store: Store) -> None:
    """Two generations, the second of which has gone back to the first one's first step; each has one layout."""
    catalog = make_root(store)
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in (1, 2)]
    second = make_generation(catalog, 2, resumed_from=saves[0])
    make_save(catalog, second, 3, {"w": np.zeros(3)})


def said(store: Store) -> list[object]:
    catalog = Catalog(store)
    visible = catalog.visible()
    layouts = [catalog.layout(digest) for save in visible for digest in catalog.manifest(save).layouts]
    return [catalog.root(), catalog.generations.records(catalog.saves()), visible, layouts]


def test_any_damage_to_one_of_the_two_costs_nothing_and_is_mended(filled: Store) -> None:
    expected, everything = said(filled), shared_keys(filled)
    assert [keys.copy_key(key) for key in everything] == sorted_keys(filled, keys.COPIES)
    assert len(everything) == 5
    for key in everything:
        whole = filled.get(key)
        for at, other in ((key, keys.copy_key(key)), (keys.copy_key(key), key)):
            for data in [*damaged(whole), *(filled.get(key) for key in everything if filled.get(key) != whole)]:
                replace_object(filled, at, data)
                assert said(filled) == expected
                assert {finding.key for finding in all_findings(filled)} == {at}
                mended = Catalog(filled).shared.mend(everything)
                assert mended == [at], "and nothing else is touched"
                assert filled.get(at) == filled.get(other) == whole
            filled.delete(at)
            assert said(filled) == expected
            assert Catalog(filled).shared.mend(everything) == [at]
    assert all_findings(filled) == []


def test_in_a_bucket(s3: ObjectStorage) -> None:
    with open_store(s3.url(), s3.options()) as store:
        fill(store)
        expected, everything = said(store), shared_keys(store)
        for key in everything:
            whole = store.get(key)
            for at in (key, keys.copy_key(key)):
                replace_object(store, at, whole[:-9] + b"#" + whole[-8:])
                assert said(store) == expected
                assert {finding.key for finding in all_findings(store)} == {at}
                assert Catalog(store).shared.mend(everything) == [at]
                assert store.get(at) == whole


def all_findings(store: Store) -> list[Finding]:
    catalog = Catalog(store)
    return [*verify_root(catalog), *(found for save in catalog.saves() for found in verify_save(catalog, save))]


def test_where_both_are_damaged_nothing_is_mended(filled: Store) -> None:
    for key in shared_keys(filled):
        both = {at: filled.get(at) for at in (key, keys.copy_key(key))}
        for at, data in both.items():
            replace_object(filled, at, data[:-9] + b"#" + data[-8:])
        before = {at: filled.get(at) for at in both}
        assert Catalog(filled).shared.mend(shared_keys(filled)) == []
        assert {at: filled.get(at) for at in both} == before
        with pytest.raises(CorruptData, match=f"/{key} does not match"):
            Catalog(filled).shared.document(key)
        for at, data in both.items():
            replace_object(filled, at, data)


@pytest.mark.parametrize("action", ["error", "denied"])
def test_an_outage_of_the_copy_is_no_damage(filled: Store, tmp_path: Path, action: str) -> None:
    """Else a restore would go on from an older step, or a job would begin the root anew."""
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "get", "key": "^copies/", "action": action}])
    for key in shared_keys(filled):
        whole = filled.get(key)
        filled.delete(key)
        for data in (None, whole[:-9] + b"#" + whole[-8:]):
            if data is not None:
                filled.put(key, data)
            catalog = Catalog(FaultStore(filled, str(plan)))
            with pytest.raises(StoreError, match="as planned"):
                catalog.shared.document(key)
            if key == keys.ROOT:
                with pytest.raises(StoreError, match="as planned"):
                    catalog.open_root(Root("0" * 32, "xxh3", 1.0))
                assert [entry.key for entry in filled.scan("") if entry.key == key] == [key] * (data is not None)
        replace_object(filled, key, whole)


def test_a_newer_copy_beside_a_damaged_document_closes_the_root(filled: Store) -> None:
    for key in (keys.ROOT, sorted_keys(filled, "generations/")[1]):
        whole = filled.get(key)
        replace_object(filled, key, whole[:-9] + b"#" + whole[-8:])
        replace_object(filled, keys.copy_key(key), of_version(whole, 3))
        with pytest.raises(NewerFormat):
            Catalog(filled).generations.check_versions()
        replace_object(filled, key, whole)
        replace_object(filled, keys.copy_key(key), whole)


def test_fields_that_this_version_does_not_know_are_copied(store: Store, catalog: Catalog) -> None:
    replace_object(store, keys.ROOT, resealed(store.get(keys.ROOT), colour="red"))
    make_save(Catalog(store), make_generation(catalog), 10, state(10))
    assert b'"colour"' in store.get(keys.ROOT)
    assert store.get(keys.copy_key(keys.ROOT)) == store.get(keys.ROOT)
    assert all_findings(store) == []


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_what_is_no_object_in_the_place_of_a_copy_costs_no_step(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = LocalStore(str(tmp_path))
    catalog = make_root(store)
    (tmp_path / "copies").mkdir()
    make(tmp_path / "copies" / "ckptlib.json")
    save = make_save(catalog, make_generation(catalog), 10, state(10))
    assert catalog.saves() == [save]
    assert "ckptlib.json: cannot publish" in caplog.text
    assert "Until then there is no second copy of ckptlib.json" in caplog.text


def test_a_record_is_put_before_its_copy_and_of_two_tries_the_first_stands(store: Store, catalog: Catalog) -> None:
    """A writer may die between the two, or hear of no answer, and the next one tell another origin."""
    first = make_generation(catalog, 1)
    saves = [make_save(catalog, first, step, state(step)) for step in (1, 2)]
    second = make_generation(catalog, 2, resumed_from=saves[0])
    record = store.get(second.key)
    store.delete(keys.copy_key(second.key))
    if isinstance(store, LocalStore):
        make_generation(Catalog(store), 2, resumed_from=saves[1])
        assert store.get(second.key) == record
    else:  # as S3, it cannot tell
        make_generation(Catalog(store), 2, resumed_from=saves[0])
    assert store.get(keys.copy_key(second.key)) == record


def test_where_a_copy_is_read_the_warning_says_what_to_do(
    catalog: Catalog, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody looks at disks for a right that is missing."""
    make_save(catalog, make_generation(catalog), 10, state(10))
    plan, root = tmp_path / "plan.json", catalog.root()
    faulty = FaultStore(store, str(plan))
    write_plan(plan, [{"op": "get", "key": f"^{keys.ROOT}", "action": "unreadable"}])
    assert Catalog(faulty).root() == root
    assert f"read instead; make it readable, or put it again: ckptlib verify --mend {faulty.url}" in caplog.text
    store.delete(keys.ROOT)
    assert catalog.root() == root
    assert f"read instead; see what hurt it, then put it again: ckptlib verify --mend {store.url}" in caplog.text


def test_a_damaged_copy_comes_again_with_the_next_start(store: Store, catalog: Catalog) -> None:
    """As the page of `ckptlib verify` says."""
    generation = make_generation(catalog)
    make_save(catalog, generation, 10, state(10))
    (layout,) = sorted_keys(store, "layouts/")
    copies = [keys.copy_key(key) for key in (keys.ROOT, layout)]
    for copy in copies:
        replace_object(store, copy, store.get(copy)[:-9] + b"#" + store.get(copy)[-8:])
    assert [finding.key for finding in all_findings(store)] == copies
    make_save(Catalog(store), generation, 11, state(11))
    assert [store.get(copy) for copy in copies] == [store.get(key) for key in (keys.ROOT, layout)]
    assert all_findings(store) == []


def test_of_a_layout_that_was_there_the_copy_is_read_without_a_listing(store: Store, catalog: Catalog) -> None:
    """Gone or damaged, it is put again."""
    generation = make_generation(catalog)
    make_save(catalog, generation, 10, state(10))
    (layout,) = sorted_keys(store, "layouts/")
    copies = [keys.copy_key(key) for key in (keys.ROOT, layout)]
    digest, document = layout.removeprefix("layouts/").removesuffix(".json"), store.get(layout)
    asked: list[str] = []
    for do in (lambda: None, lambda: store.delete(*copies), lambda: replace_object(store, copies[1], b"other")):
        do()
        seeing = ActorStore(store)  # type: ignore[arg-type]
        seeing.before = lambda op, key: asked.append(f"{op} {key}")
        shared = SharedDocuments(seeing)
        shared.root()
        assert shared.put_layout(digest, document)
        asked.clear()
        shared.put_copies([digest])
        assert not any(line.startswith("scan") for line in asked)
        assert [store.get(copy) for copy in copies] == [store.get(key) for key in (keys.ROOT, layout)]


def test_layouts_that_change_at_every_save_do_not_pile_up(
    store: Store, catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that are kept, a third takes the place of the one that was asked for first."""
    generation = make_generation(catalog)
    saves = [make_save(catalog, generation, n, {"w": np.zeros(100 + n, np.float32)}) for n in range(3)]
    digests = [next(iter(catalog.manifest(save).layouts)) for save in saves]
    one = len(store.get(keys.layout_key(digests[0])))
    monkeypatch.setattr(shared_documents, "LAYOUTS_KEPT_NBYTES", 2 * one + one // 2)
    plan = tmp_path / "plan.json"
    write_plan(plan, [])
    shared = SharedDocuments(FaultStore(store, str(plan)))
    found = [shared.layout(digests[n]).digest for n in (0, 1, 0, 2, 0, 1)]
    assert found == [digests[n] for n in (0, 1, 0, 2, 0, 1)]
    log = [json.loads(line) for line in (tmp_path / "plan.json.log").read_text().splitlines()]
    assert [line["key"] for line in log] == [keys.layout_key(digests[n]) for n in (0, 1, 2, 1)]
    monkeypatch.setattr(shared_documents, "LAYOUTS_KEPT_NBYTES", 0)  # one larger than all that is allowed
    assert shared.layout(digests[2]).digest == shared.layout(digests[2]).digest == digests[2]
    log = (tmp_path / "plan.json.log").read_text().splitlines()
    assert len(log) == 5
