"""`verify` names what is damaged; `gc` drops what it was told to, and asks before it does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

import pytest
from helpers.commands import DAY_S, Ckptlib, files, of_step, on_terminal, path_of
from helpers.increments import SIDE
from support import age, make_generation, make_save, of_version, replace_object, state
from typing_extensions import override

from ckptlib.catalog.catalog import Catalog
from ckptlib.cli import options
from ckptlib.format.keys import PARTS, copy_key
from ckptlib.stores import Entry
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import flip_bit, write_plan

LARGE = SIDE * SIDE * 4

# -- verify


def test_verify_real_saves(ckptlib: Ckptlib, saved: Path) -> None:
    before = files(saved)
    document = ckptlib("verify", saved, "--all", "--json").json
    assert document["good"]
    assert document["findings"] == []
    assert [step["step"] for step in document["steps"]] == [2, 3, 4]
    written = sum(size for path, (size, _) in before.items() if "/packs/" in path)
    assert written * 0.999 < document["nbytes"] <= written  # gaps between chunks may be left out
    shown = ckptlib("verify", saved)
    assert shown.code == 0
    assert shown.lines()[0][:3] == ["good", "step", "3"]
    assert "all good" in shown.out
    assert files(saved) == before


def test_verify_all_reads_what_steps_share_once(ckptlib: Ckptlib, sharing: Path) -> None:
    document = ckptlib("verify", sharing, "--all", "--json").json
    written = sum(size for path, (size, _) in files(sharing).items() if "/packs/" in path)
    assert written * 0.98 < document["nbytes"] == sum(step["nbytes"] for step in document["steps"]) <= written
    alone = [ckptlib("verify", sharing, step, "--json").json["nbytes"] for step in range(1, 6)]
    assert min(alone) > 4 * LARGE
    pack = of_step(sharing, "packs", 1)
    flip_bit(pack, pack.stat().st_size - LARGE // 2)  # in a tensor that all share
    result = ckptlib("verify", sharing, "--all", "--json")
    assert result.code == 1
    assert [(one["step"], one["damage"]) for one in result.json["findings"]] == [(n, "altered") for n in range(1, 6)]


def test_verify_names_what_is_damaged(ckptlib: Ckptlib, root: Path) -> None:
    pack = of_step(root, "packs", 2, 1)
    flip_bit(pack, pack.stat().st_size // 2)
    of_step(root, "packs", 4, 0).unlink()
    flip_bit(of_step(root, "packs", 3), 40)
    result = ckptlib("verify", root, "--all", "--json")
    assert result.code == 1
    flipped, header, lost = result.json["findings"]
    assert (flipped["step"], flipped["damage"], flipped["rank"]) == (2, "altered", 1)
    assert flipped["key"] == str(pack.relative_to(root))
    assert flipped["tensors"] == [{"name": "model/large", "box": [[1500, 3000], [0, 1000]]}]
    assert flipped["offset"] <= pack.stat().st_size // 2 < flipped["offset"] + flipped["nbytes"]
    assert (header["step"], header["damage"]) == (3, "malformed")
    assert (lost["step"], lost["damage"], lost["rank"]) == (4, "missing", 0)
    assert {"name": "model/large", "box": [[0, 1500], [0, 1000]]} in lost["tensors"]

    shown = ckptlib("verify", root, 2)
    assert shown.code == 1
    assert shown.lines()[0][:3] == ["bad", "step", "2"]
    assert "model/large[1500:3000, 0:1000] of rank 1" in shown.out
    assert "1 finding" in shown.out
    assert ckptlib("verify", root).code == 1
    assert ckptlib("verify", root, 4).code == 1  # not on the history


def test_verify_with_a_damaged_history(ckptlib: Ckptlib, root: Path) -> None:
    """The generations cannot be read: the newest save is looked at all the same."""
    for record in [*root.glob("generations/*"), *root.glob("copies/generations/*")]:
        flip_bit(record, 100)
    (root / "ckptlib.json").unlink()
    document = ckptlib("verify", root, "--json").json
    assert [(one["damage"], one["key"].split("/")[0]) for one in document["findings"]] == [
        ("missing", "ckptlib.json"),
        ("altered", "generations"),
        ("altered", "generations"),
    ]
    assert [step["step"] for step in document["steps"]] == [3]


def test_verify_where_nobody_can_tell_which_steps_are_on_the_history(ckptlib: Ckptlib, made: LocalStore) -> None:
    """A record above all steps is damaged: it may be a rewind. The step that was saved last is looked at, or the named
    one."""
    catalog = Catalog(made)
    second = make_generation(catalog, 2, catalog.saves()[1])
    last = make_save(catalog, second, 3, state(3))
    lost = make_generation(catalog, 3, last)
    for key in (lost.key, copy_key(lost.key)):
        replace_object(made, key, b"{}")
    by_step = catalog.saves()
    for step, save in (("latest", last), (3, last), (5, by_step[-1]), (by_step[2], by_step[2])):
        document = ckptlib("verify", made.url, step, "--json").json
        assert [one["name"] for one in document["steps"]] == [str(save)]
        assert [one["key"] for one in document["findings"]] == [lost.key]
    said = ckptlib("verify", made.url, 77)
    assert (said.code, said.out) == (1, "")
    assert "cannot be told whether the job went back" in said.err
    for key in (lost.key, copy_key(lost.key)):
        replace_object(made, key, of_version(made.get(second.key), 3))
    document = ckptlib("verify", made.url, by_step[0], "--json").json
    assert [one["name"] for one in document["steps"]] == [str(by_step[0])]


def test_verify_looks_at_no_other_step_where_the_store_fails(
    ckptlib: Ckptlib, made: LocalStore, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    write_plan(plan, [{"op": "scan", "key": "^steps/", "nth": 1, "action": "error"}])
    said = ckptlib("verify", f"fault+{made.url}?plan={plan}")
    assert (said.code, said.out) == (1, "")
    assert "as planned" in said.err


def test_verify_mends_what_is_there_twice(ckptlib: Ckptlib, root: Path) -> None:
    """And roots of earlier versions get copies."""
    expected = {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    firsts = [root / "ckptlib.json", *root.glob("layouts/*"), *root.glob("generations/*.json")]
    damaged = [path if n % 2 else root / "copies" / path.relative_to(root) for n, path in enumerate(firsts)]
    for path in damaged:
        flip_bit(path, 100)
    keys = sorted(str(path.relative_to(root)) for path in damaged)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert ckptlib("verify", root, "--all").code == 1
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    document = ckptlib("verify", root, "--all", "--mend", "--json").json
    assert (document["good"], document["findings"], sorted(document["mended"])) == (True, [], keys)
    assert {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()} == expected
    shutil.rmtree(root / "copies")
    said = ckptlib("verify", root, "--all", "--mend")
    assert said.code == 0
    assert "put again  copies/ckptlib.json" in said.out
    assert {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()} == expected
    assert ckptlib("verify", root, "--all", "--mend", "--json").json["mended"] == []


def test_verify_mends_nothing_that_a_newer_ckptlib_has_written(ckptlib: Ckptlib, root: Path) -> None:
    """What this one takes for damaged may be as it should be."""
    for path in (root / "ckptlib.json", root / "copies" / "ckptlib.json"):
        path.write_bytes(of_version(path.read_bytes(), 3))
    flip_bit(next(root.glob("layouts/*")), 100)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    said = ckptlib("verify", root, "--all", "--mend")
    assert said.code == 1
    assert "this ckptlib reads up to 2: update ckptlib" in said.err
    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before


def test_verify_wants_a_step_or_all(ckptlib: Ckptlib, saved: Path) -> None:
    assert ckptlib("verify", saved, 2, "--all").code == 2


# -- gc


def test_gc_dry_run_changes_nothing(ckptlib: Ckptlib, made: LocalStore) -> None:
    before = files(made.url)
    document = ckptlib("gc", made.url, "--keep-last", 2, "--keep-every", 2, "--dry-run", "--json").json
    assert document["dry_run"]
    assert [row["step"] for row in document["dropped"]] == [1, 3]
    assert document["deleted"] == []
    shown = ckptlib("gc", made.url, "--keep-last", 2, "--keep-every", 2, "--dry-run")
    assert shown.lines()[0][:4] == ["would", "drop", "step", "1"]
    assert files(made.url) == before


def test_gc(ckptlib: Ckptlib, made: LocalStore) -> None:
    document = ckptlib("gc", made.url, "--keep-last", 2, "--json").json
    assert [row["step"] for row in document["dropped"]] == [1, 2, 3]
    assert all(row["nbytes"] > 0 for row in document["dropped"])
    assert [row["step"] for row in ckptlib("ls", made.url, "--json").json["steps"]] == [4, 5]
    assert [row["state"] for row in ckptlib("ls", made.url, "--all", "--json").json["steps"]] == ["trash"] * 3 + [
        "committed"
    ] * 2
    age(made, 2 * DAY_S)
    freed = ckptlib("gc", made.url, "--keep-last", 2, "--dry-run", "--json").json["nbytes_deleted"]
    done = ckptlib("gc", made.url, "--keep-last", 2)
    assert done.lines()[0][0] == "deleted"
    assert freed > 0
    assert ckptlib("ls", made.url, "--all", "--json").json["steps"] == ckptlib("ls", made.url, "--json").json["steps"]
    assert ckptlib("verify", made.url, "--all").code == 0
    assert ckptlib("gc", made.url, "--keep-last", 2).out == "nothing to do\n"


def test_gc_tells_which_of_the_kept_steps_lack_objects(ckptlib: Ckptlib, made: LocalStore) -> None:
    for step in (1, 5):
        of_step(Path(made.url.removeprefix("file://")), "packs", step).unlink()
    arguments = ("gc", made.url, "--keep-last", 2, "--dry-run")
    document = ckptlib(*arguments, "--json").json
    assert [row["step"] for row in document["dropped"]] == [1, 2]
    assert [row["step"] for row in document["broken"]] == [1, 5]
    [line] = [line for line in ckptlib(*arguments).lines() if line[0] == "lacks"]
    assert line[:4] == ["lacks", "objects", "step", "5"]


def test_gc_tells_what_stays_because_others_use_it(ckptlib: Ckptlib, sharing: Path) -> None:
    first = of_step(sharing, "packs", 1)
    nbytes = first.stat().st_size
    names = [row["name"] for row in ckptlib("ls", sharing, "--json").json["steps"]]
    expected = [{"step": 1, "name": names[0], "nbytes": nbytes, "used_by": names[3:]}]
    assert ckptlib("gc", sharing, "--keep-last", 2, "--dry-run", "--json").json["used"] == expected
    assert "would stay  step 1  1.4" in ckptlib("gc", sharing, "--keep-last", 2, "--dry-run").out
    assert ckptlib("gc", sharing, "--keep-last", 2, "--json").json["used"] == expected
    age(LocalStore(str(sharing)), 2 * DAY_S)
    done = ckptlib("gc", sharing, "--keep-last", 2)
    assert done.lines()[0][0] == "stays"
    assert "2 steps use it: 4, 5" in done.out
    assert "grace period" not in done.out
    assert first.exists()
    assert not list((sharing / "packs").glob("000000000002-*/*"))
    assert ckptlib("verify", sharing, "--all").code == 0


def test_gc_drops_what_a_rewind_left_behind(ckptlib: Ckptlib, root: Path) -> None:
    assert ckptlib("gc", root, "--keep-last", 9, "--json").json["dropped"] == []
    assert [row["step"] for row in ckptlib("gc", root, "--keep-last", 9, "--abandoned", "--json").json["dropped"]] == [
        4
    ]


class _Listed(LocalStore):
    """Notes what is listed."""

    listed: ClassVar[list[str]] = []

    @override
    def scan(self, prefix: str, after: str = "") -> list[Entry]:
        self.listed.append(prefix)
        return super().scan(prefix, after)


def test_gc_lists_parts_once_if_nobody_is_asked(
    ckptlib: Ckptlib, made: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large root has a million, and each thousand of them is a request."""
    monkeypatch.setattr(options, "open_store", lambda url, given: _Listed(str(path_of(made))))
    assert [row["step"] for row in ckptlib("gc", made.url, "--keep-last", 4, "--json").json["dropped"]] == [1]
    assert _Listed.listed.count(PARTS) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--keep-last", 0],
        [],
        ["--keep-last", 1, "--keep-every", 0],
        ["--keep-last", 1, "--grace", 0.01],
        ["--keep-last", 1, "--grace", "36s"],
        ["--keep-last", 1, "--grace", 1e20],
        ["--keep-last", 1, "--keep-within", 1e20],
    ],
)
def test_gc_usage(ckptlib: Ckptlib, made: LocalStore, arguments: list[object]) -> None:
    before = files(made.url)
    result = ckptlib("gc", made.url, *arguments)
    assert (result.code, result.out) == (2, "")
    assert files(made.url) == before


@pytest.mark.parametrize(("answer", "left"), [(b"n\n", 5), (b"y\n", 1)])
def test_gc_asks_on_a_terminal(made: LocalStore, answer: bytes, left: int) -> None:
    code, said = on_terminal(["gc", made.url, "--keep-last", "1"], answer)
    assert "would drop" in said
    assert "Drop 4 steps? [y/N]" in said
    assert code == (1 if left == 5 else 0)
    assert len(list((path_of(made) / "steps").iterdir())) == left


def test_gc_does_not_ask_when_told_so(made: LocalStore) -> None:
    code, said = on_terminal(["gc", made.url, "--keep-last", "1", "--yes"], b"")
    assert code == 0
    assert "[y/N]" not in said


def test_verify_on_a_terminal_draws_a_bar_and_wipes_it_away(made: LocalStore) -> None:
    code, said = on_terminal(["verify", made.url], b"")
    assert code == 0
    assert "\x1b[2K" in said  # the line was erased
    assert said.rstrip().endswith("all good\x1b[0m")
