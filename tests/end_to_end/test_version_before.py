"""The release that knew version 1 alone, on a root of version 2: it says so, and touches nothing."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from places import DATA
from places import ROOT as PROJECT

BEFORE = "4c76431773c7"
"""The last commit whose documents are all of version 1."""

ATTEMPTS = """
import sys, ckptlib, torch
from ckptlib.errors import NewerFormat
assert ckptlib.__file__.startswith(sys.argv[2]), ckptlib.__file__
url = sys.argv[1]
state = {"cut": torch.zeros(4, 3)}
for attempt in (
    lambda: ckptlib.load(url, state),
    lambda: ckptlib.load(url, state, step=2),
    lambda: ckptlib.save(url, state, step=9),
    lambda: ckptlib.Checkpointer(url, state, every=1, keep=ckptlib.Keep(last=1)).restore(),
    lambda: list(ckptlib.checkpoints(url)),
):
    try:
        attempt()
    except NewerFormat as error:
        assert "has format version 2; this ckptlib reads up to 1: update ckptlib" in str(error), error
    else:
        sys.exit("it went on")
print("refused")
"""


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it was."""
    archive = subprocess.run(["git", "-C", PROJECT, "archive", BEFORE, "ckptlib"], capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"no {BEFORE} here: {archive.stderr.decode().strip()[:100]}")
    path = tmp_path_factory.mktemp("before")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as found:
        for member in found:
            assert member.name.startswith("ckptlib")
            found.extract(member, path)
    return path


def content(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in root.rglob("*")
        if path.name != ".tmp"  # an empty directory, which git does not keep
    }


def run(before: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(before), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "300"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=before)


def test_it_neither_loads_nor_saves_nor_deletes(before: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(DATA / "written-by-0.2" / "root", tmp_path / "root"))
    found = content(root)
    assert "steps/000000000002" in " ".join(found)
    done = run(before, "-c", ATTEMPTS, root, before)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
    for command in (["ls"], ["gc", "--keep-last", "1", "--yes"], ["show"]):
        done = run(before, "-m", "ckptlib.cli", command[0], root, *command[1:])
        assert done.returncode == 1
        assert "has format version 2; this ckptlib reads up to 1: update ckptlib" in done.stderr
    assert content(root) == found
