"""Objects that are damaged in the store, or cannot be read: that step is named and skipped, by all ranks."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.damage import BY_BOTH, DAMAGES, NEWEST, Damage, data_of, middle, newest, replace, try_all
from workers.crash_jobs import run, try_restore, try_roots

from ckptlib.stores.testing import flip_bit, truncate, write_plan


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_damaged_step_is_refused_by_name_and_skipped_by_all_ranks(tmp_path: Path, template: Path, size: int) -> None:
    objects = {}
    cases = [case for case in DAMAGES if size == 1 or case in BY_BOTH]
    for case in cases:
        what, damage, _ = DAMAGES[case]
        shutil.copytree(template, tmp_path / case)
        objects[case] = newest(tmp_path / case, what)
        damage(objects[case])
    told = try_all(tmp_path, [tmp_path / case for case in cases], size)
    for case in cases:
        kind = DAMAGES[case][2]
        assert (len(told[case]["load"]), len(told[case]["restore"])) == (size, size)
        for line in told[case]["load"]:
            assert line["kind"] == kind, line
            assert objects[case].name.split(".")[0] in line["text"], line
            if case.endswith("-first") and case.startswith("pack"):
                assert re.search(r"\w+\[[0-9:, ]*\]: packs/", line["text"]), "names the tensor"
        for line in told[case]["restore"]:
            assert (line["kind"], line["step"]) == ("", NEWEST - 1), line
            assert len(line["skipped"]) == 1
            assert f"{NEWEST:012d}" in line["skipped"][0]


def test_damage_that_one_rank_alone_has_seen(tmp_path: Path, template: Path) -> None:
    """Rank 1 alone reads the state of its random generators; both go back to the step before."""
    shutil.copytree(template, tmp_path / "own")
    pack = newest(tmp_path / "own", "pack 1")
    flip_bit(pack, data_of(pack, "@rng/torch@0"))
    told = try_all(tmp_path, [tmp_path / "own"])["own"]
    assert [line["kind"] for line in told["load"]] == ["", ""], "generators are not asked for"
    assert [line["step"] for line in told["restore"]] == [NEWEST - 1] * 2
    assert all("@rng/torch" in line["skipped"][0] for line in told["restore"])


def test_what_hurts_no_data_is_no_damage(tmp_path: Path, template: Path) -> None:
    """Rows and digests are the truth; a pack's own header is for people. And what can be made again is no loss."""

    def header(root: Path) -> None:
        flip_bit(newest(root, "pack 0"), 20)
        flip_bit(newest(root, "pack 1"), 2)

    cases: dict[str, Damage] = {
        "pack-header": header,
        "root-gone": lambda root: newest(root, "root").unlink(),
        "generation-gone": lambda root: newest(root, "generation").unlink(),
        "manifest-gone": lambda root: newest(root, "manifest").unlink(),  # all parts are there: it is committed again
    }
    for case, damage in cases.items():
        shutil.copytree(template, tmp_path / case)
        damage(tmp_path / case)
    told = try_all(tmp_path, [tmp_path / case for case in cases])
    for case in cases:
        expected = "CheckpointNotFound" if case == "manifest-gone" else ""
        assert [line["kind"] for line in told[case]["load"]] == [expected] * 2, told[case]
        assert [(line["kind"], line.get("step")) for line in told[case]["restore"]] == [("", NEWEST)] * 2, told[case]


HURT: dict[str, tuple[Damage, str]] = {
    "flip": (lambda p: flip_bit(p, middle(p)), "CorruptData"),
    "cut": (lambda p: truncate(p, middle(p)), "CorruptData"),
    "empty": (lambda p: truncate(p, 0), "FormatError"),
    "gone": (lambda p: p.unlink(), ""),
}


@pytest.mark.slow
def test_what_all_steps_need_is_there_twice(tmp_path: Path, template: Path) -> None:
    """The root's document, the layout, the record: one of each two may be damaged, and every step loads."""
    shared = ("root", "layout", "generation")
    cases = {f"{of}-{what}-{hurt}": (what, of + what, hurt) for what in shared for of in ("", "copy of ")
             for hurt in HURT}  # fmt: skip
    for case, (_, path, hurt) in cases.items():
        shutil.copytree(template, tmp_path / case)
        HURT[hurt][0](newest(tmp_path / case, path))
    for size, hurts in ((2, ("flip", "gone")), (1, ("cut", "empty"))):  # one that is cut is found as a flipped bit is
        some = [case for case, (_, _, hurt) in cases.items() if hurt in hurts]
        told = try_all(tmp_path, [tmp_path / case for case in some], size)
        for case in some:
            assert [line["kind"] for line in told[case]["load"]] == [""] * size, case
            restored = [(line["kind"], line.get("step")) for line in told[case]["restore"]]
            assert restored == [("", NEWEST)] * size, case
    for case, (what, _, _) in cases.items():
        assert [*(tmp_path / case / newest(template, what).relative_to(template)).parent.iterdir()], case
    for case, (what, path, _) in cases.items():
        if what == "root" and path == "root":  # by the start that found it so
            assert newest(tmp_path / case, what).read_bytes() == newest(template, what).read_bytes(), case


def test_a_root_document_and_its_copy_are_damaged(tmp_path: Path, template: Path) -> None:
    damages = {case: HURT[case] for case in ("flip", "cut", "empty")}
    for case, (damage, _) in damages.items():
        shutil.copytree(template, tmp_path / case)
        damage(newest(tmp_path / case, "root"))
        damage(newest(tmp_path / case, "copy of root"))
    told = try_all(tmp_path, [tmp_path / case for case in damages])
    for case, (_, kind) in damages.items():
        assert [line["kind"] for line in told[case]["load"]] == ["", ""], "a load writes nothing and needs no root"
        for line in told[case]["restore"]:
            assert line["kind"] == kind
            assert f"{tmp_path / case}/ckptlib.json" in line["text"]


def test_a_damaged_generation_record_hides_no_step(tmp_path: Path, template: Path) -> None:
    shutil.copytree(template, tmp_path / "flip")
    record = newest(tmp_path / "flip", "generation")
    flip_bit(record, middle(record))
    told = try_all(tmp_path, [tmp_path / "flip"], size=1)["flip"]
    assert told["restore"][0].get("step") == NEWEST


def test_every_step_damaged(tmp_path: Path, template: Path) -> None:
    """Then nothing is restored: never a fresh start over the ruins."""
    shutil.copytree(template, tmp_path / "all")
    for path in (tmp_path / "all").glob("packs/*/000001-*"):
        flip_bit(path, data_of(path))
    told = try_all(tmp_path, [tmp_path / "all"])["all"]
    for line in told["restore"]:
        assert line["kind"] == "CorruptData"
        assert "every step is damaged" in line["text"]


# -- objects that cannot be read


def behind(directory: Path, template: Path, name: str, *rules: dict[str, Any], rank: str = "") -> str:
    """The URL of a copy of the template that fails by these rules; where it has them by the rank that is given."""
    root, plans = directory / f"roots{name}", directory / f"plans{rank}"
    if not root.exists():
        shutil.copytree(template, root)
    plans.mkdir(exist_ok=True)
    write_plan(plans / name, rules)
    return f"fault+file://{root}?plan={plans}/{name}"


def unreadable(key: str, *ops: str) -> list[dict[str, Any]]:
    return [{"op": op, "key": key, "action": "unreadable"} for op in ops or ("get", "get_into")]


def test_a_step_that_cannot_be_read_is_skipped_by_all_ranks(tmp_path: Path, template: Path) -> None:
    """Rank 1 alone reads its pack; rank 0 alone the manifest."""
    cases = {
        "pack": f"^packs/{NEWEST:012d}-.*/000001-",
        "part": f"^parts/{NEWEST:012d}-.*/000001-",
        "manifest": f"^steps/{NEWEST:012d}-",
        "packs": "^packs/",
        "layouts": "^(copies/)?layouts/",
        "first": "^(layouts/|ckptlib.json)",
        "generations": "^generations/",
    }
    urls = {case: behind(tmp_path, template, case, *unreadable(key)) for case, key in cases.items()}
    ranks = run(try_roots, tmp_path, 2, roots=[*urls.values()], step=NEWEST)
    for told in ranks:
        for line in told:
            case = line["root"]
            if case in ("generations", "first"):  # history ends with the head's own; copies are read
                assert (line["kind"], line["step"]) == ("", NEWEST), line
            elif line["what"] == "load":
                assert line["kind"] == "ObjectUnreadable", line
            elif case in ("packs", "layouts"):
                assert line["kind"] == "ObjectUnreadable", line
                assert "no step can be read" in line["text"]
            else:
                assert (line["kind"], line["step"], len(line["skipped"])) == ("", NEWEST - 1, 1), line
                assert "cannot be read, as planned" in line["skipped"][0]


def test_a_step_whose_manifest_cannot_be_put_back_is_none(tmp_path: Path, template: Path) -> None:
    """Its parts are all there, but in its own place is something that is no object."""
    shutil.copytree(template, tmp_path / "fifo")
    replace(newest(tmp_path / "fifo", "manifest"), os.mkfifo)
    told = try_all(tmp_path, [tmp_path / "fifo"], size=1)["fifo"]
    assert [line["kind"] for line in told["load"]] == ["CheckpointNotFound"]
    assert [(line["kind"], line["step"]) for line in told["restore"]] == [("", NEWEST - 1)]


def test_a_store_that_one_rank_cannot_reach_is_no_reason_for_an_older_step(tmp_path: Path, template: Path) -> None:
    everything = unreadable("")
    plain = {"op": "get_into", "key": f"^packs/{NEWEST:012d}-", "action": "error"}
    for name, rules, kind in [("away", everything, "ObjectUnreadable"), ("slow", [plain], "StoreError")]:
        behind(tmp_path, template, name, rank="0")
        behind(tmp_path, template, name, *rules, rank="1")
        url = f"fault+file://{tmp_path}/roots{name}?plan={tmp_path}/plans{{rank}}/{name}"
        for told in run(try_restore, tmp_path, 2, url=url):
            (line,) = told
            assert line["kind"] == kind, line
            assert "no step" not in line["text"]
