"""`ls` and `show`: what they say, in both ways of saying it, and that looking changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers.commands import Ckptlib, files, of_step
from helpers.increments import SIDE
from support import make_generation, make_root, make_save, state

from ckptlib.api import checkpoints
from ckptlib.catalog.catalog import Catalog
from ckptlib.format.keys import GenerationId, SaveId
from ckptlib.format.manifest import Generation
from ckptlib.format.values import Json
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit
from ckptlib.words import size

LARGE = SIDE * SIDE * 4

# -- ls


def test_ls(ckptlib: Ckptlib, saved: Path) -> None:
    header, *rows, total, abandoned = ckptlib("ls", saved).lines()
    assert header == ["STEP", "GEN", "AGE", "RANKS", "SIZE", "WRITTEN", "METRICS"]
    assert [row[:2] for row in rows] == [["2", "1"], ["3", "2"]]
    assert [row[4:] for row in rows] == [
        ["2", "12.0", "MB", "12.0", "MB", "loss", "2.5"],
        ["1", "12.0", "MB", "12.0", "MB", "loss", "2.25", "note", r"rewound\x1b[31m"],
    ]
    assert total == ["2", "steps,", "24.0", "MB", "in", "24.1", "MB"]
    assert " ".join(abandoned) == "1 step abandoned by a rewind (ckptlib ls --tree)"


def test_ls_of_steps_that_share(ckptlib: Ckptlib, sharing: Path) -> None:
    header, *rows, total = ckptlib("ls", sharing).lines()
    assert header == ["STEP", "GEN", "AGE", "RANKS", "SIZE", "WRITTEN", "USES", "OLDEST", "METRICS"]
    document = ckptlib("ls", sharing, "--json").json["steps"]
    packs = {step: of_step(sharing, "packs", step).stat().st_size for step in range(1, 6)}
    for row, shown in zip(document, rows, strict=True):
        step = row["step"]
        assert row["nbytes"] == packs[step]
        assert row["nbytes_state"] >= 4 * LARGE
        assert [int(name[:12]) for name in row["stands_on"]] == ([] if step == 1 else [1])
        assert row["oldest"] == document[0]["created"]
        assert shown[9] == str(len(row["stands_on"]))
    assert total == ["5", "steps,", "7.25", "MB", "in", size(sum(packs.values())).split()[0], "MB"]

    ckptlib("gc", sharing, "--keep-last", 2)
    assert ckptlib("ls", sharing).out.endswith(", and in packs of 1 other save (ckptlib du)\n")
    every = ckptlib("ls", sharing, "--all")
    assert every.lines()[-1][-2:] == [size(sum(packs.values())).split()[0], "MB"]  # each pack once


def test_a_step_that_two_jobs_saved_is_listed_once(ckptlib: Ckptlib, made: LocalStore) -> None:
    """A job restored step 5 from memory and saved it again; then a writer of the job before committed it, too."""
    catalog, root = Catalog(made), Path(made.url.removeprefix("file://"))
    before = catalog.saves()[-1]
    generation = make_generation(catalog, 2, resumed_from=before)
    for step in (5, 6):
        make_save(catalog, generation, step, state(step))
    last = [(5, 2), (6, 2)]
    assert [(row["step"], row["generation"]) for row in ckptlib("ls", root, "--json").json["steps"]][-2:] == last
    assert [row[0] for row in ckptlib("ls", root).lines()[1:-1]] == [*"123456"]
    assert [(info.step, info.generation) for info in checkpoints(root)][-3:] == [(4, 1), *last]
    every = ckptlib("ls", root, "--all", "--json").json["steps"]
    assert [(row["step"], row["generation"]) for row in every][-3:] == [(5, 1), *last]
    assert catalog.resolve(5).generation == generation


def test_ls_all(ckptlib: Ckptlib, root: Path) -> None:
    store = LocalStore(str(root))
    store.put(SaveId(9, GenerationId(2, "f" * 8)).pack_key(0, "0" * 8, 0), bytes(1000))
    store.put(SaveId(1, GenerationId(1, "f" * 8)).trash_key, b"{}")
    document = ckptlib("ls", root, "--all", "--json").json
    assert [(row["step"], row["state"]) for row in document["steps"]] == [
        (1, "trash"),
        (2, "committed"),
        (3, "committed"),
        (4, "left behind"),
        (9, "uncommitted"),
    ]
    assert document["steps"][-1]["nbytes"] == 1000
    shown = ckptlib("ls", root, "--all")
    assert "loss nan" in shown.out
    assert len(shown.lines()) == 1 + 5 + 2
    assert [row["step"] for row in ckptlib("ls", root, "--json").json["steps"]] == [2, 3]


def test_ls_of_a_damaged_manifest(ckptlib: Ckptlib, root: Path) -> None:
    flip_bit(next((root / "steps").glob("*2-000001-*")), 300)
    result = ckptlib("ls", root)
    assert result.code == 1
    assert result.lines()[1][:6] == ["2", "1", "-", "-", "-", "-"]
    assert "does not match its digest" in result.err
    assert [row["state"] for row in ckptlib("ls", root, "--json").json["steps"]] == ["damaged", "committed"]


def test_ls_where_there_is_nothing(ckptlib: Ckptlib, tmp_path: Path) -> None:
    result = ckptlib("ls", tmp_path / "nowhere")
    assert (result.code, result.out) == (1, "")
    assert result.err.count("\n") == 1
    assert "holds no checkpoints" in result.err
    assert not (tmp_path / "nowhere").exists()
    make_root(LocalStore(str(tmp_path / "empty")))
    result = ckptlib("ls", tmp_path / "empty")
    assert result.code == 0
    assert "no committed step" in result.out


# -- show


def test_show_of_a_step_that_stands_on_others(ckptlib: Ckptlib, shared: Path) -> None:
    shown = ckptlib("show", shared)
    assert "stands on   1 other save (step 1); its oldest chunk is " in shown.out
    assert "all chunks are stored as they are" in shown.out
    document = ckptlib("show", shared, "--json").json
    assert document["codecs"].keys() == {"raw"}
    raw = document["codecs"]["raw"]
    assert raw["nbytes"] == raw["nbytes_stored"] == document["nbytes_state"]
    assert document["kinds"]["model/*w1"] == {"raw": {"num_chunks": 1, "nbytes": LARGE, "nbytes_stored": LARGE}}
    assert document["kinds"]["small tensors"]["raw"]["num_chunks"] == 1  # of the model and of @rng
    assert document["objects"]["packs"]["number"] == 1


def test_show_of_a_damaged_part(ckptlib: Ckptlib, sharing: Path) -> None:
    """All that is known is told."""
    flip_bit(of_step(sharing, "parts", 5), 300)
    result = ckptlib("show", sharing)
    assert result.code == 1
    assert "total" in result.out
    assert "does not match the digest in its name" in result.err


def test_show_where_a_record_cannot_be_read(ckptlib: Ckptlib, root: Path) -> None:
    """What the step itself holds is there all the same."""
    for directory in ("generations", "copies/generations"):
        flip_bit(sorted((root / directory).glob("*.json"))[0], 100)
    result = ckptlib("show", root, "--json")
    assert result.code == 1
    assert result.json["totals"]["model"]["num_tensors"] == 5
    assert [one["generation"] for one in result.json["generations"]] == [2]
    (problem,) = result.json["problems"]
    assert "generations/000001-" in problem
    assert "whose generation has no record" in ckptlib("show", root).out


def test_show(ckptlib: Ckptlib, saved: Path) -> None:
    shown = ckptlib("show", saved)
    assert shown.code == 0
    text = " ".join(shown.out.split())
    assert "step 3 12.0 MB by 1 rank" in text
    assert "resumed from step 2 of generation 1" in text
    assert "total 9 12.0 MB" in text
    assert "\x1b" not in shown.out

    document = ckptlib("show", saved, 2, "--tensors", "model/*", "--values", "--json").json
    assert (document["step"], document["world_size"], document["visible"]) == (2, 2, True)
    assert document["values"]["epoch"] == 2
    assert document["totals"]["model"] == {"num_tensors": 5, "nbytes": 12_000_000 + 30 + 3 + 64 + 8}
    assert document["totals"]["cursor"] == {"num_tensors": 1, "nbytes": 32}
    tensors = {tensor["name"]: tensor for tensor in document["tensors"]}
    assert tensors["model/large"] == {
        "name": "model/large",
        "dtype": "float32",
        "shape": [3000, 1000],
        "held": "S0 on 2",
        "nbytes": 12_000_000,
    }
    assert tensors["model/complex"]["dtype"] == "complex128"
    assert set(tensors) == {f"model/{name}" for name in ("large", "small", "flags", "complex", "count")}
    assert ckptlib("show", saved, 2, "--tensors", "model", "--json").json["tensors"] == document["tensors"]
    packs = [path for path in files(saved) if "/packs/000000000002" in path]
    assert document["objects"]["packs"] == {"number": 2, "nbytes": sum(files(saved)[path][0] for path in packs)}
    assert set(document["generations"][0]["versions"]) == {"python", "torch", "ckptlib"}


def test_show_of_a_flat_state(ckptlib: Ckptlib, tmp_path: Path) -> None:
    """Such as model.state_dict(), of which each tensor is an entry: the largest are shown, and the sum of others."""
    store = LocalStore(str(tmp_path / "root"))
    catalog = make_root(store)
    make_save(catalog, make_generation(catalog), 1, {f"w{n:04}": np.zeros(100 + n, "u1") for n in range(1000)})
    lines = ckptlib("show", store.url).lines()
    at = lines.index(["STATE", "TENSORS", "SIZE"])
    assert [line[0] for line in lines[at + 1 : at + 51]] == [f"w{n:04}" for n in range(950, 1000)]
    assert lines[at + 51 : at + 53] == [
        ["950", "others", "(--tensors)", "950", *size(sum(range(100, 1050))).split()],
        ["total", "1,000", *size(sum(range(100, 1100))).split()],
    ]
    assert len(ckptlib("show", store.url, "--json").json["totals"]) == 1000


def test_show_a_step_that_was_left_behind_by_its_name(ckptlib: Ckptlib, saved: Path) -> None:
    name = next(row["name"] for row in ckptlib("ls", saved, "--all", "--json").json["steps"] if row["step"] == 4)
    document = ckptlib("show", saved, name, "--json").json
    assert (document["step"], document["visible"]) == (4, False)
    missing = ckptlib("show", saved, 4)
    assert missing.code == 1
    assert "holds no step 4; the last ones are: 2, 3" in missing.err


def test_errors_are_json_too(ckptlib: Ckptlib, saved: Path) -> None:
    result = ckptlib("show", saved, 7, "--json")
    assert result.code == 1
    assert result.json["error"]["kind"] == "CheckpointNotFound"
    assert result.err.count("\n") == 1


def test_show_prints_what_ran(ckptlib: Ckptlib, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "root"))
    catalog = make_root(store)
    run: dict[str, Json] = {
        "argv": ["train.py", "--name", "two words", "\x1b[31m"],
        "git": {"commit": "c" * 40, "dirty": True},
        "config": {"lr": 0.1, "layers": {"$tuple": [1, 2]}, "name": "x"},
    }
    generation = GenerationId(1, "0" * 8)
    catalog.generations.put(Generation(generation, 1, None, 0.0, {}, "here", run=run))
    make_save(catalog, generation, 1, state(1))
    assert ckptlib("show", store.url, "--json").json["generations"][0]["run"] == run
    shown = ckptlib("show", store.url).out
    assert r"train.py --name 'two words' '\x1b[31m'" in shown
    assert f"{'c' * 40}, with changes" in shown
    assert [line.split()[1:] for line in shown.splitlines() if line.startswith("config.")] == [
        ["0.1"],
        ['{"$tuple":', "[1,", "2]}"],
        ["x"],
    ]


def test_show_of_a_record_that_nobody_would_write(ckptlib: Ckptlib, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "root"))
    catalog = make_root(store)
    generation = GenerationId(1, "0" * 8)
    for run in ({"argv": 1, "git": [], "config": 3.0}, {"argv": [None, {}], "git": {}, "config": {"\x1b": []}}):
        store.delete(generation.key)
        store.put(generation.key, Generation(generation, 1, None, 0.0, {}, "here", run=run).encode())  # type: ignore[arg-type]
        if not catalog.saves():
            make_save(catalog, generation, 1, state(1))
        said = ckptlib("show", store.url)
        assert said.code == 0
        assert "\x1b" not in said.out
