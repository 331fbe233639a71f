"""`refresh`: the mark, and that the next save of a job that goes on writes again what it covers."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import DAY_S, Ckptlib, files
from helpers.flushed import note_flushes
from helpers.increments import SIDE, body_of, save_steps
from onerank import Root
from support import age

from ckptlib.catalog.catalog import Catalog
from ckptlib.stores.local import LocalStore

LARGE = SIDE * SIDE * 4


def test_the_next_save_writes_again_what_is_marked(ckptlib: Ckptlib, tmp_path: Path) -> None:
    root = tmp_path / "root"
    save_steps(root, 1, 2)
    marked = ckptlib("refresh", root, 2, "--json").json
    assert marked["new"]
    assert [int(name[:12]) for name in marked["written_again"]] == [1, 2]
    assert body_of(root / marked["key"])["save"] == marked["name"]
    save_steps(root, 3, 4)
    written = [row["nbytes"] for row in ckptlib("ls", root, "--json").json["steps"]]
    assert written[2] > 4 * LARGE > 2 * LARGE > written[3]
    assert [int(name[:12]) for name in ckptlib("show", root, "--json").json["stands_on"]] == [3]
    assert ckptlib("verify", root, "--all").code == 0

    shown = ckptlib("refresh", root, 2)
    assert "was marked already" in shown.out
    assert "nothing to do" in shown.out


def test_a_mark_that_is_there_is_no_error_and_stays_as_it_is(
    ckptlib: Ckptlib, sharing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "2 saves up to step 5" in ckptlib("refresh", sharing, "latest").out
    before, flushed = files(sharing), note_flushes(monkeypatch)
    again = ckptlib("refresh", sharing, 5, "--json")
    assert (again.code, again.json["new"]) == (0, False)
    assert files(sharing) == before
    assert f"{sharing}/steps" in flushed, "who has put it may have been killed before that"
    assert len(Catalog(LocalStore(str(sharing))).steps().refreshes) == 1
    assert [row["step"] for row in ckptlib("ls", sharing, "--json").json["steps"]] == [1, 2, 3, 4, 5]


def test_a_step_that_is_not_there_is_refused(ckptlib: Ckptlib, sharing: Path) -> None:
    before = files(sharing)
    result = ckptlib("refresh", sharing, 6)
    assert result.code == 1
    assert "holds no step 6; the last ones are: 1, 2, 3, 4, 5" in result.err
    assert ckptlib("refresh", sharing).code == 2
    assert files(sharing) == before


def test_the_mark_stays_while_a_step_uses_what_it_distrusts(ckptlib: Ckptlib, sharing: Path) -> None:
    ckptlib("refresh", sharing, 1)
    ckptlib("gc", sharing, "--keep-last", 2)
    age(LocalStore(str(sharing)), 2 * DAY_S)
    ckptlib("gc", sharing, "--keep-last", 2)
    steps = Catalog(LocalStore(str(sharing))).steps()
    assert [save.step for save in steps.refreshes] == [1]
    assert 1 not in [save.step for save in steps.saves], "later steps use its packs, and may be handed on"


def test_what_a_mark_that_a_rewind_left_behind_covers(ckptlib: Ckptlib, tmp_path: Path) -> None:
    """Nothing of the steps since, though their numbers are lower."""
    root = tmp_path / "root"
    save_steps(root, 1, 4)
    Root(root).close()
    left_behind = ckptlib("show", root, 4, "--json").json["name"]
    assert ckptlib("rewind", root, 1, "--yes").code == 0
    save_steps(root, 2, 3)
    marked = ckptlib("refresh", root, left_behind, "--json").json
    assert [int(name[:12]) for name in marked["written_again"]] == [1]
