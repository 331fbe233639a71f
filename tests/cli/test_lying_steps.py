"""Steps whose documents are sealed well and do not fit each other: every command tells which one, and goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Ckptlib
from support import commit_unproved, make_generation, put_part, replace_object

from ckptlib.catalog.catalog import Catalog
from ckptlib.format.box import Box
from ckptlib.format.keys import PartName, SaveId
from ckptlib.format.layout import Layout, Mesh, Placed, TensorEntry
from ckptlib.format.sharding import Shard, StridedShard
from ckptlib.format.table import Table
from ckptlib.stores.local import LocalStore

ATTEMPT = "b77e3b70"

EMPTY = Layout(1, ())


def change_manifest(store: LocalStore, save: SaveId, **fields: object) -> None:
    manifest = replace(Catalog(store).manifest(save), **fields)  # type: ignore[arg-type]
    replace_object(store, save.manifest_key, manifest.encode())


def change_part(store: LocalStore, save: SaveId, **fields: object) -> PartName:
    """The step then has another part, of another attempt, with the same packs."""
    catalog = Catalog(store)
    part = catalog.part(catalog.manifest(save).parts[0])
    name, document = replace(part, attempt=ATTEMPT, **fields).encode()  # type: ignore[arg-type]
    store.put(name.key, document)
    change_manifest(store, save, parts=(name,))
    return name


def say_it_has_no_tensors(store: LocalStore, save: SaveId) -> None:
    Catalog(store).shared.put_layout(EMPTY.digest, EMPTY.encoded)
    change_manifest(store, save, layouts={EMPTY.digest: (0,)})


def newest(store: LocalStore) -> SaveId:
    return Catalog(store).saves()[-1]


def test_verify_all_goes_on_behind_an_algorithm_that_nobody_knows(ckptlib: Ckptlib, made: LocalStore) -> None:
    name = change_part(made, Catalog(made).saves()[1], algorithm="sha256")
    result = ckptlib("verify", made.url, "--all", "--json")
    assert result.code == 1
    assert [(step["step"], step["good"]) for step in result.json["steps"]] == [(n, n != 2) for n in range(1, 6)]
    (finding,) = result.json["findings"]
    assert (finding["damage"], finding["key"], finding["rank"]) == ("malformed", name.key, 0)
    assert "'sha256' is not one of xxh3, blake3" in finding["message"]


def test_verify_all_goes_on_behind_placements_that_torch_refuses(ckptlib: Ckptlib, made: LocalStore) -> None:
    generation = make_generation(Catalog(made), 2, newest(made), world_size=4)
    save, twice = SaveId(6, generation), (StridedShard(0, 3), Shard(0))
    layout = Layout(4, (TensorEntry("w", "float32", (8, 4), Placed(Mesh((2, 2), (0, 1, 2, 3)), twice, None)),))
    rows = {"w": np.zeros((8, 4), np.float32)}
    shards = [[("w", Box((2 * rank, 0), (2, 4)))] for rank in range(4)]
    catalog = Catalog(made)
    names = [put_part(catalog, save, rank, layout, rows, shards=of) for rank, of in enumerate(shards)]
    commit_unproved(made, save, names)  # type: ignore[arg-type]
    result = ckptlib("verify", made.url, "--all", "--json")
    assert result.code == 1
    assert [(step["step"], step["good"]) for step in result.json["steps"]] == [(n, n != 6) for n in range(1, 7)]
    (finding,) = result.json["findings"]
    assert (finding["damage"], finding["key"]) == ("malformed", save.manifest_key)
    assert finding["message"].startswith(f"{save.manifest_key}: w: dim 0 of size 8, sharded as SS0x3 over 2")


@pytest.mark.parametrize("command", [("show",), ("diff", 4, 5), ("diff", 3, 5), ("verify",)])
def test_a_layout_that_is_not_that_of_the_parts(
    ckptlib: Ckptlib, made: LocalStore, command: tuple[str | int, ...]
) -> None:
    """Of step 5. Step 4 is cut like it; step 3 has no tensors, and says so."""
    third = Catalog(made).saves()[2]
    change_part(made, third, table=Table(EMPTY.digest, (), (), (), (), (), ()), digests=(), packs=())
    say_it_has_no_tensors(made, third)
    say_it_has_no_tensors(made, newest(made))
    (name,) = Catalog(made).manifest(newest(made)).parts
    result = ckptlib(command[0], made.url, *command[1:], "--json")
    assert result.code == 1
    told = " ".join([result.out, result.err])
    assert name.key in told
    assert f"expected one that its manifest names: {EMPTY.digest}" in told


def test_a_report_of_a_table_that_is_not_of_its_layout(ckptlib: Ckptlib, made: LocalStore, tmp_path: Path) -> None:
    Catalog(made).shared.put_layout(EMPTY.digest, EMPTY.encoded)
    catalog = Catalog(made)
    table = catalog.part(catalog.manifest(newest(made)).parts[0]).table
    name = change_part(made, newest(made), table=replace(table, layout=EMPTY.digest))
    result = ckptlib("report", made.url, "-o", tmp_path / "page.html", "--json")
    assert result.code == 1
    assert result.json["steps"] == 5
    assert [f"{name.key}: a shard names tensor 2 of 0" in problem for problem in result.json["problems"]] == [True]


def test_show_counts_the_packs_of_earlier_attempts(ckptlib: Ckptlib, made: LocalStore) -> None:
    """Which a resumed import names in its part; what another attempt left is not counted."""
    before = ckptlib("show", made.url, "--json").json["objects"]["packs"]
    assert before["number"] == 1
    save = newest(made)
    change_part(made, save)
    made.put(save.pack_key(0, "0" * 8, 0), bytes(1000))
    assert ckptlib("show", made.url, "--json").json["objects"]["packs"] == before
    assert ckptlib("show", made.url, 4, "--json").json["objects"]["packs"] == before


def test_show_counts_the_packs_of_a_part_that_cannot_be_read(ckptlib: Ckptlib, made: LocalStore) -> None:
    before = ckptlib("show", made.url, "--json").json["objects"]["packs"]
    (name,) = Catalog(made).manifest(newest(made)).parts
    replace_object(made, name.key, made.get(name.key)[:-30])
    result = ckptlib("show", made.url, "--json")
    assert result.code == 1
    assert result.json["objects"]["packs"] == before
