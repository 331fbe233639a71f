"""`rewind` and `ls --tree`: what is refused, what is said, and that nothing is deleted."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from helpers.commands import DAY_S, Ckptlib, files, of_step, on_terminal, path_of
from support import age, make_generation, make_root, make_save, of_version, put_parts, replace_object, state

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.finishing import finish_saves
from ckptlib.cli.tree import Branch, branches_of, drawn
from ckptlib.errors import StoreDenied, Superseded
from ckptlib.format.keys import GenerationId, SaveId, copy_key
from ckptlib.format.manifest import Generation
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit, write_plan


@pytest.fixture
def old(made: LocalStore) -> LocalStore:
    """Steps 1 to 5, put yesterday."""
    age(made, DAY_S)
    return made


def steps(ckptlib: Ckptlib, store: LocalStore) -> list[int]:
    return [row["step"] for row in ckptlib("ls", store.url, "--json").json["steps"]]


def test_later_steps_are_hidden_and_stay(ckptlib: Ckptlib, old: LocalStore) -> None:
    before = files(old.url)
    said = ckptlib("rewind", old.url, 3)
    assert said.code == 0
    assert "goes back to step 3: the next job resumes there" in said.out
    assert steps(ckptlib, old) == [1, 2, 3]
    after = files(old.url)
    assert {name: after[name] for name in before} == before, "nothing is deleted or changed"
    copy, new = sorted(after.keys() - before.keys())
    assert "/generations/" in new
    assert copy == new.replace("/generations/", "/copies/generations/")
    assert "2 steps abandoned by a rewind" in ckptlib("ls", old.url).out

    undo = said.out.split("ckptlib rewind ")[1].split()
    assert ckptlib("rewind", *undo).code == 0, "a rewind is no job that may still run"
    assert steps(ckptlib, old) == [1, 2, 3, 4, 5]


def test_what_people_put_tells_of_no_job(ckptlib: Ckptlib, old: LocalStore) -> None:
    assert ckptlib("pin", old.url, 3).code == 0
    assert ckptlib("refresh", old.url, 3).code == 0
    assert ckptlib("rewind", old.url, 3).code == 0


def test_gc_drops_what_was_abandoned_when_it_is_told_to(ckptlib: Ckptlib, old: LocalStore) -> None:
    ckptlib("rewind", old.url, 3)
    assert ckptlib("gc", old.url, "--keep-last", 9, "--json").json["dropped"] == []
    dropped = ckptlib("gc", old.url, "--keep-last", 9, "--abandoned", "--json").json["dropped"]
    assert [row["step"] for row in dropped] == [4, 5]
    age(old, 2 * DAY_S)
    ckptlib("gc", old.url, "--keep-last", 1)
    assert steps(ckptlib, old) == [3]
    assert ckptlib("verify", old.url).code == 0


def test_a_step_that_is_not_there_is_refused_with_those_that_are(ckptlib: Ckptlib, old: LocalStore) -> None:
    before = files(old.url)
    for step in (6, 0, "000000000005-000009-00000009"):
        said = ckptlib("rewind", old.url, step)
        assert said.code == 1
        assert "holds no s" in said.err
    assert "the last ones are: 1, 2, 3, 4, 5" in ckptlib("rewind", old.url, 6).err
    assert ckptlib("rewind", old.url).code == 2
    assert files(old.url) == before


@pytest.mark.parametrize(
    ("kind", "how"),
    [("steps", "altered"), ("parts", "gone"), ("parts", "altered"), ("packs", "gone"), ("packs", "cut")],
)
def test_a_damaged_step_is_refused_with_the_others(ckptlib: Ckptlib, old: LocalStore, kind: str, how: str) -> None:
    root = path_of(old)
    path = next((root / "steps").glob("000000000003-*")) if kind == "steps" else of_step(root, kind, 3)
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip_bit(path, 200)
    before = files(old.url)
    said = ckptlib("rewind", old.url, 3)
    assert said.code == 1
    assert "step 3 is damaged: " in said.err
    assert "Nothing was changed. Other steps: 1, 2, 4, 5" in said.err
    assert files(old.url) == before


def test_a_step_that_cannot_be_read_is_not_told_as_damaged(ckptlib: Ckptlib, old: LocalStore) -> None:
    """As where the user of the command may not read what the job has put."""
    url = f"fault+{old.url}?plan={path_of(old).parent / 'plan'}"
    write_plan(path_of(old).parent / "plan", [{"op": "get", "key": "^steps/0+3-", "action": "unreadable", "nth": 0}])
    said = ckptlib("rewind", url, 3)
    assert said.code == 1
    assert "step 3 cannot be read: " in said.err
    assert "Nothing was changed. Other steps: 1, 2, 4, 5" in said.err


def test_a_job_that_may_be_running_is_not_superseded_unasked(ckptlib: Ckptlib, made: LocalStore) -> None:
    before = files(made.url)
    said = ckptlib("rewind", made.url, 3)
    assert said.code == 1
    assert "it may still run. If it does, it stops with Superseded at its next save" in said.err
    assert files(made.url) == before
    assert ckptlib("rewind", made.url, 3, "--yes").code == 0
    with pytest.raises(Superseded, match="or this job was told to go back while it ran, as by ckptlib rewind"):
        Catalog(made).generations.check_head(GenerationId(1, f"{1:08x}"))


def test_a_step_tells_of_a_job_and_so_does_a_record_alone(ckptlib: Ckptlib, made: LocalStore) -> None:
    """One that has just begun has put no step; one that runs for long put its record long ago."""
    root = Path(made.url.removeprefix("file://"))
    for young in ("steps", "generations"):
        for file in filter(Path.is_file, root.rglob("*")):
            os.utime(file, (time.time() - 86400 * (file.relative_to(root).parts[0] != young),) * 2)
        assert "it may still run" in ckptlib("rewind", made.url, 3).err, young
    for file in filter(Path.is_file, root.rglob("*")):
        os.utime(file, (time.time() - 86400,) * 2)
    assert ckptlib("rewind", made.url, 3).code == 0


def test_where_the_standard_input_is_closed_nobody_is_asked(
    ckptlib: Ckptlib, made: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # as Python has it then
    assert "it may still run" in ckptlib("rewind", made.url, 3).err
    assert ckptlib("gc", made.url, "--keep-last", 2).code == 0


def test_who_says_yes_needs_no_clock_of_the_store(
    ckptlib: Ckptlib, made: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the right to delete, which reading it takes."""

    def refuse(self: LocalStore, *keys: str) -> None:
        raise StoreDenied(f"{keys[0]}: AccessDenied")

    monkeypatch.setattr(LocalStore, "delete", refuse)
    assert ckptlib("rewind", made.url, 3, "--yes").code == 0
    assert not [*made.scan("trash/")]


def test_on_a_terminal_it_asks(made: LocalStore) -> None:
    status, said = on_terminal(["rewind", made.url, "3"], b"n\n")
    assert status == 1
    asked = " ".join(said.split())
    assert "if it still runs, it stops at its next save. Go back to step 3 and abandon 2 steps?" in asked
    assert len(Catalog(made).visible()) == 5
    assert on_terminal(["rewind", made.url, "3"], b"y\n")[0] == 0
    assert len(Catalog(made).visible()) == 3


def test_what_is_whole_is_committed_first(ckptlib: Ckptlib, old: LocalStore) -> None:
    """The record of the rewind supersedes its job: nobody could commit it later."""
    save, _ = put_parts(Catalog(old), GenerationId(1, f"{1:08x}"), 6, state(6))
    said = ckptlib("rewind", old.url, 6, "--yes", "--json")
    assert (said.code, said.json["name"], said.json["abandoned"]) == (0, str(save), [])
    assert steps(ckptlib, old) == [1, 2, 3, 4, 5, 6]


def test_nothing_is_changed_where_a_newer_ckptlib_has_saved(ckptlib: Ckptlib, old: LocalStore) -> None:
    """Nor is what is whole committed first."""
    catalog = Catalog(old)
    put_parts(catalog, GenerationId(1, f"{1:08x}"), 6, state(6))
    newer = make_generation(catalog, 2)
    for key in (newer.key, copy_key(newer.key)):
        replace_object(old, key, of_version(old.get(key), 3))
    before = files(old.url)
    for step in (3, "latest", catalog.saves()[2]):
        said = ckptlib("rewind", old.url, step, "--yes")
        assert (said.code, "update ckptlib" in said.err) == (1, True)
    assert files(old.url) == before


def test_what_a_dead_job_finishes_later_stays_hidden(ckptlib: Ckptlib, old: LocalStore) -> None:
    ckptlib("rewind", old.url, 3)
    catalog = Catalog(old)
    put_parts(catalog, GenerationId(1, f"{1:08x}"), 6, state(6))
    head = max(catalog.generations.ids())
    assert finish_saves(catalog, GenerationId(head.number + 1, "0" * 8)) == []
    assert steps(ckptlib, old) == [1, 2, 3]


def test_where_there_is_nothing(ckptlib: Ckptlib, tmp_path: Path) -> None:
    assert "holds no checkpoints" in ckptlib("rewind", tmp_path / "none", 3).err
    assert not (tmp_path / "none").exists()


# -- the tree


def test_tree(ckptlib: Ckptlib, tmp_path: Path) -> None:
    store = LocalStore(str(tmp_path / "root"))
    catalog = make_root(store)
    first = make_generation(catalog, 1, world_size=8)
    saves = [make_save(catalog, first, step, state(step), 8) for step in (1, 2, 3)]
    second = make_generation(catalog, 2, resumed_from=saves[1])
    make_save(catalog, second, 4, state(4))
    make_generation(catalog, 3, resumed_from=saves[2])
    ckptlib("rewind", store.url, 2, "--yes")
    lines = ckptlib("ls", store.url, "--tree").out.splitlines()
    assert [line.split(", ")[0].partition(" ago")[0] for line in lines] == [
        "* generation 1: 8 ranks",
        "  - generation 2: from step 2",
        "  - generation 3: from step 3",
        "* generation 14: goes back to step 2",
    ]
    assert lines[0].endswith("2 steps from 1 to 2, abandoned: step 3")
    assert lines[1].endswith("abandoned: step 4")
    assert lines[3].endswith("no step")
    told = ckptlib("ls", store.url, "--json").json["generations"]
    assert [(row["generation"], row["on_history"], row["rewind"]) for row in told] == [
        (1, True, False),
        (2, False, False),
        (3, False, False),
        (14, True, True),
    ]
    assert [[int(name[:12]) for name in row["abandoned"]] for row in told] == [[3], [4], [], []]
    assert told[3]["resumed_from"] == str(saves[1])


def test_a_tree_of_any_records_has_each_generation_once() -> None:
    def generation(number: int) -> GenerationId:
        return GenerationId(number, "0" * 8)

    def record(number: int, origin: int | None) -> Generation:
        save = None if origin is None else SaveId(1, generation(origin))
        return Generation(generation(number), 1, save, 0.0, {}, "here")

    for origins in ([2, 1], [1, 1, 2], [None, 1, 2, 2, 9], [3, 3, 3], [None] * 3):
        records = {generation(n): record(n, origin) for n, origin in enumerate(origins, 1)}
        found = drawn(branches_of([], records, [generation(77)]))
        assert sorted(branch.id for _, branch in found) == sorted([*records, generation(77)])
    restarts = {generation(n): record(n, n - 1 if n > 1 else None) for n in range(1, 3000)}
    line: list[tuple[int, Branch]] = drawn(branches_of([SaveId(1, generation(2999))], restarts, []))
    assert {depth for depth, _ in line} == {0}, "restarts are a straight line"
