"""Roots in which a newer ckptlib has written: what goes on, and what refuses them whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launch import fork_one
from support import of_version

import ckptlib
from ckptlib.errors import NewerFormat
from ckptlib.format.documents import VERSION


def state(step: int) -> dict[str, object]:
    return {"w": torch.arange(100.0) + step, "step": step}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Steps 1 and 2."""
    for step in (1, 2):
        ckptlib.save(tmp_path / "root", state(step), step=step)
    return tmp_path / "root"


def rewrite(root: Path, pattern: str, change: Callable[[bytes], bytes]) -> None:
    (path,) = root.glob(pattern)
    path.write_bytes(change(path.read_bytes()))


def newer(data: bytes) -> bytes:
    return of_version(data, VERSION + 1)


def run(*arguments: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "ckptlib.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env={**os.environ, "COLUMNS": "200"})
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def restored(root: Path) -> ckptlib.LoadReport:
    with ckptlib.Checkpointer(root, state(0), every=1000) as ckpt:
        return ckpt.restore()


def test_a_newer_manifest_is_a_row_a_finding_and_skipped(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(root, "steps/*2-000001-*", newer)
    report = restored(root)
    assert report.step == 1
    assert "step 000000000002-" in caplog.text
    assert "is of a newer format and is skipped, the next is tried" in caplog.text
    code, out, err = run("ls", root, "--json")
    assert (code, [row["state"] for row in json.loads(out)["steps"]]) == (1, ["committed", "newer"])
    assert "update ckptlib" in err
    code, out, _ = run("verify", root, "--all", "--json")
    assert code == 1
    assert [(one["damage"], one["step"]) for one in json.loads(out)["findings"]] == [("newer", 2)]
    with pytest.raises(NewerFormat, match=r"version 3.*update ckptlib"):
        ckptlib.load(root, state(0))
    assert ckptlib.load(root, state(0), step=1).step == 1


def test_where_every_manifest_is_newer_nothing_is_restored(root: Path) -> None:
    for step in (1, 2):
        rewrite(root, f"steps/*{step}-000001-*", newer)
    with pytest.raises(NewerFormat, match="this ckptlib is too old to read any step; upgrade it"):
        restored(root)


@pytest.mark.parametrize("what", ["ckptlib.json", pytest.param("generations/*", marks=pytest.mark.slow)])
def test_a_newer_root_or_generation_refuses_the_root(tmp_path: Path, root: Path, what: str) -> None:
    """An older step may be of a past that the newer job has left, and what looks abandoned may be needed."""
    rewrite(root, what, newer)
    files = sorted(path for path in root.rglob("*") if path.is_file())
    attempts: list[Callable[[], object]] = [
        lambda: restored(root),
        lambda: ckptlib.load(root, state(0), step=1),
        lambda: ckptlib.load(root, state(0), step=next((root / "steps").iterdir()).stem),
        lambda: ckptlib.Checkpointer(root, state(3), every=1000),
    ]
    if what != "ckptlib.json":  # whose version the newest record has, too: the newest step is told by that alone
        attempts.append(lambda: ckptlib.load(root, state(0)))
    for attempt in attempts:
        with pytest.raises(NewerFormat, match=r"version 3; .*update ckptlib"):
            attempt()
    script, log = tmp_path / "save.py", tmp_path / "log"
    script.write_text(f"import ckptlib, torch; ckptlib.save({str(root)!r}, {{'w': torch.zeros(100)}}, step=3)")
    assert fork_one(script, log=log, timeout_s=150) == 1  # a new session
    assert "NewerFormat" in log.read_text().splitlines()[-1]
    code, _, err = run("gc", root, "--keep-last", 1, "--yes")
    assert (code, "update ckptlib" in err) == (1, True)
    assert files == sorted(path for path in root.rglob("*") if path.is_file())
    code, out, err = run("ls", root)
    assert (code, len(out.splitlines())) == (1, 4), out  # titles, two steps, what they take together
    assert "update ckptlib to restore, load, save or gc" in err
    code, out, _ = run("verify", root, "--json")
    document = json.loads(out)
    assert (code, [one["damage"] for one in document["findings"]]) == (1, ["newer"])
    assert [step["good"] for step in document["steps"]] == [True]


@pytest.mark.parametrize(
    "what",
    [
        *("ckptlib.json", "generations/*", "parts/*2-*/*"),
        *(pytest.param(what, marks=pytest.mark.slow) for what in ("steps/*2-000001-*", "layouts/*")),
    ],
)
def test_one_flipped_bit_in_a_version_blocks_nothing(root: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(root, what, lambda data: b'{"ckptlib":3' + data[len(b'{"ckptlib":1') :])
    target = state(0)
    assert ckptlib.load(root, target).step == 2
    assert torch.equal(target["w"], torch.arange(100.0) + 2)  # type: ignore[arg-type]
    if what != "ckptlib.json":  # which a load needs only to see that it may
        assert "the version in it was altered" in caplog.text
    assert restored(root).step == 2
    for command in (["ls"], ["gc", "--dry-run", "--keep-last", "1"], ["show"]):
        assert run(command[0], root, *command[1:])[0] == 0
    code, out, _ = run("verify", root, "--json")
    assert (code, [one["damage"] for one in json.loads(out)["findings"]]) == (1, ["altered"])
    ckptlib.save(root, state(3), step=3)
    assert [info.step for info in ckptlib.checkpoints(root)] == [1, 2, 3]
