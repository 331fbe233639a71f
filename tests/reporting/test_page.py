"""Pages of roots that are hostile, damaged, empty, strange or long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.pages import check_harmless
from places import TESTS
from support import make_generation, make_root, make_save, replace_object, state

from ckptlib.catalog.accounts import put_account
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.codings import Codings, Count
from ckptlib.errors import CheckpointNotFound
from ckptlib.format import keys
from ckptlib.format.account import DIED, Account, Mark, encode_accounts
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation, TrashRecord
from ckptlib.format.part import FailedPart
from ckptlib.reporting.gather import gather
from ckptlib.reporting.page import page
from ckptlib.reporting.plots import MAX_COURSES
from ckptlib.reporting.records import Times
from ckptlib.stores.local import LocalStore

HOSTILE = "</td><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;\x1b[2J\u202e"
SEEN = "</td><script>alert(1)</script>\"'><img src=x onerror=alert(2)>&lt;\\x1b[2J\\u202e"


def run(root: Path, num_steps: int = 3) -> tuple[Catalog, list[SaveId]]:
    catalog = make_root(LocalStore(str(root)))
    generation = make_generation(catalog)
    return catalog, [make_save(catalog, generation, step, state(step)) for step in range(1, num_steps + 1)]


def shown(catalog: Catalog) -> str:
    return page(gather(Catalog(catalog.store)))


def test_whatever_a_root_says_is_text(tmp_path: Path) -> None:
    """Its URL, hosts, versions, tags, metrics, names of tensors, what ranks said, why steps were dropped."""
    catalog, saves = run(tmp_path / HOSTILE.replace("/", "|"))
    bad = Generation(GenerationId(2, "0" * 8), 1, saves[0], 1e9, {HOSTILE: HOSTILE}, HOSTILE, {HOSTILE: HOSTILE})
    catalog.generations.put(bad)
    named = make_save(catalog, bad.id, 4, {f"model/{HOSTILE}": np.zeros(4, np.float32)})
    metrics = {HOSTILE: HOSTILE, "loss": {"$float": HOSTILE}, "deep": [[HOSTILE]]}
    told = {"interval_why": HOSTILE, "restored_from": HOSTILE}
    manifest = replace(catalog.manifest(named), metrics=metrics | {"ckptlib.interval": 7}, account=told)
    replace_object(catalog.store, named.manifest_key, manifest.encode())
    name, document = FailedPart(SaveId(5, bad.id), 0, "a" * 8, f"{HOSTILE}\n{HOSTILE}").encode()
    catalog.store.put(name.key, document)
    dropped = TrashRecord(SaveId(6, bad.id), HOSTILE)
    catalog.store.put(dropped.save.trash_key, dropped.encode())
    records = gather(Catalog(catalog.store))
    codings = Codings({HOSTILE: {"raw": Count(1, 2, 2), HOSTILE: Count(1, 2, 1)}})
    found = check_harmless(page(replace(records, newest=codings)))
    assert found.text.count("<script>alert(1)</script>") >= 7
    cells = [cell for row in found.rows for cell in row]
    assert SEEN in cells  # the host
    assert f"rank 0: {SEEN.replace(chr(92) + 'x1b', chr(92) + 'x1b')}; {SEEN}" in cells
    assert any(cell.startswith(SEEN) and "loss" in cell for cell in cells)
    assert "\x1b" not in found.text
    assert "\u202e" not in found.text


@pytest.mark.parametrize("created", [0.0, -5.0, 1e300, -1e300, 2.0**62])
def test_times_that_are_none(tmp_path: Path, created: float) -> None:
    catalog, saves = run(tmp_path)
    manifest = replace(catalog.manifest(saves[1]), created=created, nbytes=2**62, nbytes_state=2**62)
    replace_object(catalog.store, saves[1].manifest_key, manifest.encode())
    record = Generation(GenerationId(7, "0" * 8), 10**6, saves[0], created, {}, "h", rewind=True)
    catalog.generations.put(record)
    check_harmless(shown(catalog))


def test_an_account_of_strange_times(tmp_path: Path) -> None:
    catalog, saves = run(tmp_path)
    marks = (Mark(0, 0.0, 0.0), Mark(0, 0.0, 0.0), Mark(1, 1e9, 1e9), Mark(10**12 - 1, 1e9, 1e9))
    put_account(catalog, saves[0].generation, Account(9e9, 3e9, 0.0, "died", 2**62, marks))
    check_harmless(shown(catalog))


def test_damage_is_told_and_hides_nothing_else(tmp_path: Path) -> None:
    catalog, saves = run(tmp_path)
    part = catalog.manifest(saves[0]).parts[0].key
    for key in (saves[1].manifest_key, part):
        data = catalog.store.get(key)
        replace_object(catalog.store, key, data[:-9] + b"damaged!}")
    found = gather(Catalog(catalog.store))
    assert [step.save for step in found.steps] == [saves[0], saves[2]]
    assert [step.content is not None for step in found.steps] == [False, True]
    assert len(found.problems) == 2
    text = check_harmless(page(found)).text
    assert "2 objects could not be read" in text
    assert str(saves[1]) in text


def test_a_lost_record_of_a_generation(tmp_path: Path) -> None:
    catalog, saves = run(tmp_path)
    key = saves[0].generation.key
    catalog.store.delete(key)
    assert "its record cannot be read" not in check_harmless(page(gather(Catalog(catalog.store)))).text, "its copy can"
    catalog.store.delete(keys.copy_key(key))
    found = gather(Catalog(catalog.store))
    assert len(found.steps) == 3
    assert "its record cannot be read" in check_harmless(page(found)).text


@pytest.mark.parametrize("version", ["written-by-0.1", "written-by-0.2"])
def test_roots_of_older_versions(version: str) -> None:
    roots = [path.parent for path in (TESTS / "data" / version).rglob("ckptlib.json")]
    assert roots
    for root in roots:
        found = gather(Catalog(LocalStore(str(root))))
        assert found.steps
        assert not found.problems
        assert "left no account of the time" in check_harmless(page(found)).text


def test_replicas_in_memory(tmp_path: Path) -> None:
    catalog, saves = run(tmp_path)
    domains = (HOSTILE, HOSTILE, "rack 2")
    catalog.generations.put(Generation(GenerationId(2, "0" * 8), 3, saves[0], 1e9, {}, "h", {}, domains, 1))
    text = check_harmless(shown(catalog)).text
    assert "generation 2: snapshots in memory, 1 replica of each, over 2 failure domains" in text


def test_a_job_that_was_started_very_often(tmp_path: Path) -> None:
    catalog, saves = run(tmp_path, 1)
    accounts = {
        GenerationId(n, "0" * 8): Account(1.7e9 + 10 * n, 9.0, 1.0, DIED, 1, (Mark(n, 0.0, 0.0), Mark(n + 3, 7.0, 0.5)))
        for n in range(2, 10_000)
    }
    catalog.store.put(saves[0].generation.account_key("0" * 8), encode_accounts(accounts))
    text = shown(catalog)
    found = check_harmless(text)
    assert len(text) < 1_000_000
    assert found.tags.count("polyline") <= 2 * MAX_COURSES
    assert "The newest 300 of 9,999." in found.text
    assert "9,998 starts failed" in found.text


def test_a_root_without_steps(tmp_path: Path) -> None:
    catalog = make_root(LocalStore(str(tmp_path)))
    found = check_harmless(shown(catalog))
    assert "None is committed." in found.text
    assert "No start of this run has left an account of its time." in found.text


def test_no_root(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound):
        gather(Catalog(LocalStore(str(tmp_path))))


def test_what_is_not_recorded_is_said(tmp_path: Path) -> None:
    catalog, _ = run(tmp_path)
    text = check_harmless(shown(catalog)).text
    assert "No save has left word of how long training waited" in text
    assert "The times of the manifests tell nothing" in text  # these were taken in 1970
    assert "ETTR" not in text


def test_a_long_run(tmp_path: Path) -> None:
    """Ten thousand steps make no page that a browser cannot show."""
    catalog, _ = run(tmp_path, 1)
    found = gather(catalog)
    first = found.steps[0]
    many = [
        replace(
            first, save=SaveId(n, first.save.generation), created=1.7e9 + 60 * n, times=Times(n * 1e-3, 0.1, 60.0, 1)
        )
        for n in range(1, 10_001)
    ]
    text = page(replace(found, steps=many, problems=["x" * 10_000] * 10_000))
    check_harmless(text)
    assert len(text) < 1_500_000
    assert "at most 10.0 s (step 10000)" in text
    assert "The newest 1,000 of 10,000 steps." in text
