"""`pin` and `unpin`; what `ls`, `show` and `gc` make of pinned, exempt and best steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import Ckptlib, files, path_of
from support import age, make_root, make_save, state

from ckptlib.catalog.catalog import Catalog
from ckptlib.format.keys import GenerationId
from ckptlib.format.manifest import Generation
from ckptlib.policy.best import Best
from ckptlib.stores.local import LocalStore

LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 1.5, 5: 4.0}


@pytest.fixture
def judged(tmp_path: Path) -> LocalStore:
    """Steps 1 to 5 of a job that calls step 2 the best, and that saved step 3 as exempt."""
    store = LocalStore(str(tmp_path / "judged"))
    catalog = make_root(store)
    generation = GenerationId(1, "1" * 8)
    catalog.generations.put(Generation(generation, 1, None, 0.0, {}, "here", best=Best("loss", "min")))
    for step, loss in LOSSES.items():
        metrics = {"loss": loss, "acc": loss / 10}
        age(store, 3600)
        make_save(catalog, generation, step, state(step), metrics=metrics, exempt=step == 3, created=step * 3600.0)
    return store


def kept(ckptlib: Ckptlib, store: LocalStore) -> dict[int, list[str]]:
    rows = ckptlib("ls", store.url, "--json").json["steps"]
    return {row["step"]: row["kept"] for row in rows if row["kept"]}


def test_a_pinned_step_outlives_gc(ckptlib: Ckptlib, made: LocalStore) -> None:
    pinned = ckptlib("pin", made.url, 2, "--json").json
    assert (pinned["step"], pinned["pinned"], pinned["changed"]) == (2, True, True)
    before = files(path_of(made))
    assert ckptlib("pin", made.url, 2).out == "step 2 was pinned already\n"
    assert files(path_of(made)) == before
    assert kept(ckptlib, made) == {2: ["pinned"]}
    shown = ckptlib("ls", made.url).out
    assert "KEPT" in shown
    assert shown.count("pinned") == 1
    assert "kept        pinned" in ckptlib("show", made.url, 2).out
    assert [row["step"] for row in ckptlib("gc", made.url, "--keep-last", 1, "--json").json["dropped"]] == [1, 3, 4]
    assert ckptlib("unpin", made.url, 2).out == "step 2 is no longer pinned\n"
    assert ckptlib("unpin", made.url, 2).out == "step 2 was not pinned\n"
    assert kept(ckptlib, made) == {}
    assert [row["step"] for row in ckptlib("gc", made.url, "--keep-last", 1, "--json").json["dropped"]] == [2]


def test_without_marks_nothing_is_shown(ckptlib: Ckptlib, made: LocalStore) -> None:
    assert "KEPT" not in ckptlib("ls", made.url).out
    assert "kept" not in ckptlib("show", made.url, 2).out


def test_a_step_that_is_gone_or_never_was(ckptlib: Ckptlib, made: LocalStore) -> None:
    ckptlib("gc", made.url, "--keep-last", 2)
    for step in (1, 99):
        result = ckptlib("pin", made.url, step)
        assert result.code == 1
        assert f"holds no step {step}; the last ones are: 4, 5" in result.err
    assert ckptlib("pin", made.url).code == 2


def test_best_and_exempt_are_marked_and_found(ckptlib: Ckptlib, judged: LocalStore) -> None:
    assert kept(ckptlib, judged) == {2: ["best"], 3: ["exempt"]}
    assert ckptlib("show", judged.url, "best", "--json").json["step"] == 2
    highest = ckptlib("show", judged.url, "best", "--metric", "acc", "--mode", "max", "--json").json
    assert (highest["step"], highest["kept"]) == (5, [])
    assert ckptlib("pin", judged.url, "best").out == "step 2 is pinned\n"
    assert ckptlib("show", judged.url, 2, "--json").json["kept"] == ["pinned", "best"]


def test_the_best_is_told_by_the_copy_of_a_lost_record(ckptlib: Ckptlib, judged: LocalStore) -> None:
    (record,) = path_of(judged).glob("generations/*")
    record.unlink()
    assert kept(ckptlib, judged) == {2: ["best"], 3: ["exempt"]}
    assert ckptlib("show", judged.url, "best", "--json").json["step"] == 2


def test_a_best_that_nobody_can_tell(ckptlib: Ckptlib, made: LocalStore) -> None:
    result = ckptlib("show", made.url, "best")
    assert result.code == 1
    assert "ckptlib show: --metric val_loss --mode min" in " ".join(result.err.split())
    result = ckptlib("show", made.url, "best", "--metric", "loss", "--mode", "min")
    assert result.code == 1
    assert "holds no step with a number as metric 'loss'" in " ".join(result.err.split())
    for arguments in (
        ["best", "--metric", "loss"],
        ["best", "--metric", "", "--mode", "min"],
        ["best", "--mode", "min"],
        [3, "--metric", "loss", "--mode", "min"],
    ):
        assert ckptlib("show", made.url, *arguments).code == 2


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ([], [3, 5]),
        (["--exempt"], [5]),
        (["--exempt", "--keep-best", "loss", "--mode", "min", "--num-best", 2], [2, 4, 5]),
        (["--keep-best", "acc", "--mode", "min"], [2, 3, 5]),
        (["--keep-within", 1.5], [3, 4, 5]),
        (["--keep-within", "90min"], [3, 4, 5]),
        (["--keep-within", ".5"], [3, 5]),
        (["--keep-every", 4], [3, 4, 5]),
    ],
)
def test_gc_has_the_rules_of_keep(ckptlib: Ckptlib, judged: LocalStore, options: list[object], left: list[int]) -> None:
    assert ckptlib("gc", judged.url, "--keep-last", 1, *options).code == 0
    assert [save.step for save in Catalog(judged).saves()] == left


@pytest.mark.parametrize(
    "options", [["--keep-best", "loss"], ["--mode", "min"], ["--keep-within", 0], ["--keep-best", "", "--mode", "min"]]
)
def test_rules_that_make_no_sense(ckptlib: Ckptlib, judged: LocalStore, options: list[object]) -> None:
    before = files(path_of(judged))
    assert ckptlib("gc", judged.url, "--keep-last", 1, *options).code == 2
    assert files(path_of(judged)) == before


def test_the_best_needs_a_mode_in_the_words_of_the_command(ckptlib: Ckptlib, judged: LocalStore) -> None:
    assert "needs --mode min" in ckptlib("gc", judged.url, "--keep-last", 1, "--keep-best", "loss").err
    assert "go with --keep-best" in ckptlib("gc", judged.url, "--keep-last", 1, "--mode", "min").err
