"""`diff`: what changed, in chunks and in elements, between steps that are cut alike and steps that are not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import Ckptlib, files, of_step
from helpers.increments import SIDE
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_generation, make_root, make_save

from ckptlib.catalog.catalog import Catalog
from ckptlib.cli import changes
from ckptlib.cli.changes import ValueChanges
from ckptlib.cli.diff import compare
from ckptlib.format.box import Box
from ckptlib.format.digests import XXH3
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.part import Part
from ckptlib.format.table import Table
from ckptlib.format.values import Json
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore
from ckptlib.stores.testing import flip_bit

LARGE = SIDE * SIDE * 4


def test_steps_that_share(ckptlib: Ckptlib, shared: Path) -> None:
    before = files(shared)
    document = ckptlib("diff", shared, 1, 5, "--json").json
    assert document["cut_alike"]
    changed = {row["name"]: row["nbytes_changed"] for row in document["changed"]}
    assert changed == {"model/s1": 4, "model/w0": LARGE}  # of one chunk
    assert document["values"] == [
        {"path": "epoch", "kind": "changed", "rank": 0, "num_ranks": 1, "a": 1, "b": 5},
        {"path": "schedule/steps/0", "kind": "changed", "rank": 0, "num_ranks": 1, "a": 1, "b": 5},
        {"path": "schedule/steps/1", "kind": "changed", "rank": 0, "num_ranks": 1, "a": 2, "b": 6},
    ]
    assert (document["added"], document["removed"], document["replaced"]) == ([], [], [])
    deep = ckptlib("diff", shared, 1, 5, "--deep", "--json").json
    assert [(r["name"], r["nbytes_changed"], r["num_elements_changed"]) for r in deep["changed"]] == [
        ("model/s1", 4, 1),
        ("model/w0", 4, 1),
    ]
    shown = ckptlib("diff", shared, 1, "latest")
    assert ["model/w0", "360", "kB", "360", "kB", "100.0", "%"] in shown.lines()
    assert "2 of 13 tensors changed" in shown.out
    assert "0 of 13 tensors changed" in ckptlib("diff", shared, 4, 4).out
    assert files(shared) == before


def test_steps_of_other_world_sizes(ckptlib: Ckptlib, saved: Path) -> None:
    """Step 3 of one rank went on from step 2 of two, and changed nothing but where the data loader stands."""
    document = ckptlib("diff", saved, 2, 3, "--json").json
    assert not document["cut_alike"]
    assert {row["name"] for row in document["changed"]} <= {"@rng/torch.cpu", "@rng/python", "@rng/numpy"}
    name = next(row["name"] for row in ckptlib("ls", saved, "--all", "--json").json["steps"] if row["step"] == 4)
    document = ckptlib("diff", saved, 3, name, "--deep", "--json").json
    large = next(row for row in document["changed"] if row["name"] == "model/large")
    assert (large["num_elements_changed"], large["nbytes_changed"]) == (3_000_000, 12_000_000)
    assert next(row for row in document["values"] if row["path"] == "epoch")["b"] == 4
    assert "cut differently" in ckptlib("diff", saved, 2, 3).out


def test_added_removed_and_replaced(ckptlib: Ckptlib, tmp_path: Path) -> None:
    catalog = make_root(LocalStore(str(tmp_path / "root")))
    generation = make_generation(catalog)
    w = np.arange(12, dtype=np.float32)
    make_save(catalog, generation, 1, {"same": w, "gone": w, "dtype": w, "shape": w})
    make_save(catalog, generation, 2, {"same": w, "new": w, "dtype": w.astype(np.float64), "shape": w[:5]})
    document = ckptlib("diff", tmp_path / "root", 1, 2, "--json").json
    assert [row["name"] for row in document["added"]] == ["new"]
    assert [row["name"] for row in document["removed"]] == ["gone"]
    assert [(row["name"], row["a"]["dtype"], row["b"]["shape"]) for row in document["replaced"]] == [
        ("dtype", "float32", [12]),
        ("shape", "float32", [5]),
    ]
    assert document["changed"] == []
    assert document["num_tensors"] == 1
    lines = ckptlib("diff", tmp_path / "root", 1, 2).lines()
    assert ["dtype", "float32", "12", "float64", "12"] in lines
    assert ["new", "-", "float32", "12"] in lines


def test_damage_is_no_difference(ckptlib: Ckptlib, sharing: Path) -> None:
    pack = of_step(sharing, "packs", 5)
    flip_bit(pack, pack.stat().st_size // 2)
    result = ckptlib("diff", sharing, 1, 5, "--deep")
    assert result.code == 1
    assert "does not match" in result.err
    assert ckptlib("diff", sharing, 1, 6).code == 1


@settings(max_examples=25)
@given(st.data())
def test_against_numpy(data: st.DataObject) -> None:
    """Bit for bit: a NaN equals itself, and -0 is not 0."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shapes = {"a": (40, 60), "b": (7, 5), "c": (3,), "d": (9, 2, 3)}
    states: list[Mapping[str, np.ndarray]] = [{n: rng.random(s, np.float32) for n, s in shapes.items()}]
    states.append({name: array.copy() for name, array in states[0].items()})
    for array in states[1].values():
        flat = array.reshape(-1)
        for at in data.draw(st.lists(st.integers(0, flat.size - 1), max_size=4)):
            flat[at] = data.draw(st.sampled_from([np.nan, -0.0, 0.0, 1e-45, 7.0]))
    catalog = make_root(MemoryStore())
    generation = make_generation(catalog)
    sizes = [data.draw(st.integers(1, 3)) for _ in states]
    saves = [make_save(catalog, generation, step, states[step], sizes[step]) for step in (0, 1)]
    ends = [catalog.manifest(save) for save in saves]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "PIECE_BYTES", data.draw(st.sampled_from([1, 100, 4096, 1 << 22])))
        found = compare(catalog, ends[0], ends[1], [*shapes], deep=True)
        coarse = compare(catalog, ends[0], ends[1], [*shapes], deep=False)
    bits = [{name: array.view(np.uint32) for name, array in state.items()} for state in states]
    expected = {name: int((bits[0][name] != bits[1][name]).sum()) for name in shapes}
    assert found.cut_alike == (sizes[0] == sizes[1])
    assert {n: c.elements for n, c in found.changed.items()} == {n: m for n, m in expected.items() if m}
    assert all(changed.nbytes == 4 * changed.elements for changed in found.changed.values())
    assert found.changed.keys() == coarse.changed.keys()
    for name, changed in coarse.changed.items():
        assert 4 * expected[name] <= changed.nbytes <= states[0][name].nbytes


def test_chunks_of_equal_digest_are_not_read(shared: Path) -> None:
    class Deaf(LocalStore):
        def get_into(self, key: str, offset: int, buffer: memoryview, *, deadline: float | None = None) -> None:
            raise AssertionError(f"{key} was read")

    catalog = Catalog(LocalStore(str(shared)))
    saves = catalog.saves()
    names = ["model/w0", "model/w1"]
    deaf = Catalog(Deaf(str(shared)))
    assert compare(deaf, deaf.manifest(saves[2]), deaf.manifest(saves[2]), names, deep=True).changed == {}
    with pytest.raises(AssertionError, match="was read"):
        compare(deaf, deaf.manifest(saves[1]), deaf.manifest(saves[2]), names, deep=True)


def test_boxes_of_thousands_of_ranks_meet_soon() -> None:
    """A job of 4,096 ranks went on with 2,048. Pair by pair, each shape of a tensor would take ten seconds."""
    before = tuple(Box((2 * i, 0), (2, 64)) for i in range(4096))
    after = tuple(Box((4 * i, 0), (4, 64)) for i in range(2048))
    began = time.process_time()
    found = changes._meetings(before, after)
    assert time.process_time() - began < 3
    assert found == tuple((i, i // 2, box) for i, box in enumerate(before))


def part(rank: int, values: dict[str, Json]) -> Part:
    table = Table("0" * 32, (), (), (), (), (), ())
    return Part(SaveId(1, GenerationId(1, "0" * 8)), rank, 3, "0" * 8, table, (), XXH3, (), values, {}, 0.0)


def test_values_by_entry() -> None:
    found = ValueChanges()
    nan: Json = {"$float": "nan"}
    before: dict[str, Json] = {"g": {"lr": 0.1, "eps": 1e-8, "betas": {"$tuple": [1]}}, "n": nan, "x": 1, "one": 1}
    after: dict[str, Json] = {"g": {"lr": 0.2, "eps": 1e-8, "betas": {"$tuple": [2]}}, "n": nan, "y": 2, "one": True}
    for rank in range(3):
        found.add(part(rank, before), part(rank, before if rank == 0 else after))
    told = {path: (v.kind, v.rank, v.num_ranks, v.before, v.after) for path, v in found.found.items()}
    assert told == {
        "g.betas": ("changed", 1, 2, {"$tuple": [1]}, {"$tuple": [2]}),
        "g.lr": ("changed", 1, 2, 0.1, 0.2),
        "one": ("changed", 1, 2, 1, True),
        "x": ("removed", 1, 2, 1, None),
        "y": ("added", 1, 2, None, 2),
    }


def test_entries_of_what_was_saved_whole() -> None:
    """By the names that they had in steps of earlier versions, so that these can be compared."""
    found = ValueChanges()
    before: dict[str, Json] = {"a": {"$nest": [1, {"$tuple": [2, {"x/y": 3}]}]}, "b/0": 5, "c": {"$nest": []}}
    after: dict[str, Json] = {"a": {"$nest": [1, {"$tuple": [4, {"x/y": 6}]}, 7]}, "b": {"$nest": [5]}, "c": 8}
    found.add(part(0, before), part(0, after))
    assert {path: (v.kind, v.before, v.after) for path, v in found.found.items()} == {
        "a/1/0": ("changed", 2, 4),
        "a/1/1/x%2Fy": ("changed", 3, 6),
        "a/2": ("added", None, 7),
        "c": ("changed", [], 8),
    }
