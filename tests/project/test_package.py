"""The package as users get it: wheel and sdist hold what they should, and an index would take them."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT

import ckptlib


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By ending."""
    directory = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in directory.iterdir()}


def test_an_index_would_take_them(built: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_every_module_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (license_text,) = (wheel.read(name) for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    sources = (path for path in (ROOT / "ckptlib").rglob("*") if path.suffix in (".py", ".typed"))
    assert found == {path.relative_to(ROOT).as_posix() for path in sources}
    assert license_text == (ROOT / "LICENSE").read_bytes()


def test_what_an_index_shows_has_no_link_that_leads_nowhere(built: dict[str, Path]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    with zipfile.ZipFile(built[".whl"]) as wheel:
        (metadata,) = (wheel.read(name).decode() for name in wheel.namelist() if name.endswith("METADATA"))
    head, _, text = metadata.partition("\n\n")
    assert "Description-Content-Type: text/markdown" in head
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", text)
    assert "The upper half shows" in readme
    assert "The upper half shows" not in text, "what explains the picture"
    for part in ("survive any kill", "with ckptlib.Checkpointer(", "## Beside other libraries", "## Limits"):
        assert part in text
    assert len(text) > 0.7 * len(readme)


def test_the_sdist_has_what_the_tests_need(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    for name in ("pyproject.toml", "FORMAT.md", "tests/conftest.py", "benchmarks/__main__.py", "docs/cli.md"):
        assert name in names


def test_versions_agree() -> None:
    version = ckptlib.__version__
    assert re.search(rf'^version = "{re.escape(version)}"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)
