"""`ls --local`: which steps are where."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.commands import Ckptlib, files
from support import make_generation, make_save, of_version, put_parts, replace_object, state

from ckptlib.catalog.begun import Begun, note
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.known_generations import KnownGenerations
from ckptlib.format.keys import GenerationId, SaveId, copy_key
from ckptlib.format.manifest import Generation
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit


@pytest.fixture
def root(made: LocalStore) -> Path:
    return Path(made.url.removeprefix("file://"))


@pytest.fixture
def disk(root: Path, tmp_path: Path) -> Path:
    """All of the root but the manifests."""
    disk = Path(shutil.copytree(root, tmp_path / "disk"))
    shutil.rmtree(disk / "steps")
    return disk


def lose(root: Path, save: SaveId, *prefixes: str) -> None:
    for prefix in prefixes:
        shutil.rmtree(root / prefix / str(save))


def test_where_each_step_is(ckptlib: Ckptlib, root: Path, disk: Path) -> None:
    """Steps 1 and 2 are in the store only, 5 on the disk only."""
    saves = Catalog(LocalStore(str(root))).visible()
    for save in saves[:2]:
        lose(disk, save, "parts", "packs")
    lose(root, saves[4], "parts", "packs")
    (root / saves[4].manifest_key).unlink()
    before = files(root), files(disk)
    header, *rows, _ = ckptlib("ls", root, "--local", disk).lines()
    assert header[:8] == ["STEP", "GEN", "AGE", "RANKS", "SIZE", "WRITTEN", "LOCAL", "STATE"]
    assert [(row[0], row[-2:]) for row in rows] == [
        ("1", ["-", "committed"]),
        ("2", ["-", "committed"]),
        ("3", ["1", "committed"]),
        ("4", ["1", "committed"]),
        ("5", ["1", "local"]),
    ]
    document = ckptlib("ls", root, "--local", disk, "--json").json["steps"]
    assert [row["local"] and row["local"]["ranks"] for row in document] == [None, None, [0], [0], [0]]
    assert document[4]["local"]["nbytes"] == sum(p.stat().st_size for p in (disk / saves[4].packs_prefix).iterdir())
    assert (files(root), files(disk)) == before, "looking changes nothing"


def test_a_step_that_the_disk_lacks(ckptlib: Ckptlib, root: Path, disk: Path) -> None:
    shutil.rmtree(disk / "parts")
    document = ckptlib("ls", root, "--local", disk, "--json").json["steps"]
    assert [row["local"] for row in document] == [None] * 5
    assert "local" not in ckptlib("ls", root, "--json").json["steps"][0]


def test_a_directory_of_another_root_is_refused(ckptlib: Ckptlib, root: Path, disk: Path, tmp_path: Path) -> None:
    result = ckptlib("ls", root, "--local", tmp_path / "nowhere")
    assert result.code == 2
    assert "there is no such directory" in result.err
    text = (disk / "ckptlib.json").read_bytes()
    flip_bit(disk / "ckptlib.json", text.index(b'"id":"') + 6)
    shutil.rmtree(disk / "copies")
    assert ckptlib("ls", root, "--local", disk).code == 1


def test_steps_of_a_job_that_ended_before_the_store_had_its_record(ckptlib: Ckptlib, root: Path, disk: Path) -> None:
    """The next job finds them, unless another one has gone on without them."""
    on_disk, catalog = LocalStore(str(disk)), Catalog(LocalStore(str(root)))
    ended = GenerationId(2, "d" * 8)
    note(on_disk, Begun(Generation(ended, 1, None, 1.5, {}, "host"), 6, True, KnownGenerations(1)))
    put_parts(Catalog(on_disk), ended, 6, state(6))

    def states(*flags: str) -> list[str]:
        rows = ckptlib("ls", root, "--local", disk, *flags, "--json").json["steps"]
        return [row["state"] for row in rows if row["step"] == 6]

    assert states() == states("--all") == ["local"]
    make_generation(catalog, 3)
    assert (states(), states("--all")) == ([], ["left behind"])


def test_a_root_of_a_newer_ckptlib_is_listed_with_its_disk(ckptlib: Ckptlib, root: Path, disk: Path) -> None:
    """As without it: who only looks is told that a newer one has saved, beside what can be told."""
    store = LocalStore(str(root))
    newer = make_generation(Catalog(store), 2)
    for key in (newer.key, copy_key(newer.key)):
        replace_object(store, key, of_version(store.get(key), 3))
    found = ckptlib("ls", root, "--local", disk, "--json")
    assert [(row["step"], row["local"]["ranks"]) for row in found.json["steps"]] == [(n, [0]) for n in range(1, 6)]
    assert "update ckptlib" in found.json["problem"]


def test_steps_that_would_hide_what_an_older_job_has_committed_since(ckptlib: Ckptlib, root: Path, disk: Path) -> None:
    on_disk, catalog = LocalStore(str(disk)), Catalog(LocalStore(str(root)))
    origin, ended = catalog.visible()[-1], GenerationId(2, "d" * 8)
    note(on_disk, Begun(Generation(ended, 1, origin, 1.5, {}, "host"), 6, False, KnownGenerations(1, (), origin)))
    put_parts(Catalog(on_disk), ended, 6, state(6))

    def rows(*flags: str) -> list[tuple[int, str]]:
        found = ckptlib("ls", root, "--local", disk, *flags, "--json").json["steps"]
        return [(row["generation"], row["state"]) for row in found if row["step"] == 6]

    assert rows() == [(2, "local")]
    make_save(catalog, origin.generation, 6, state(6))
    assert (rows(), rows("--all")) == ([(1, "committed")], [(1, "committed"), (2, "left behind")])
