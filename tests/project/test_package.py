"""The package as users get it: wheel and sdist hold what they should, and an index would take them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from places import ROOT

import ckptlib

ADDRESS = "https://example.org/someone/ckptlib"


def build(directory: Path, repository: str = "", *only: str) -> dict[str, Path]:
    """By ending."""
    command = [sys.executable, "-m", "hatchling", "build", *only, "-d", str(directory)]
    environment = {**os.environ, "CKPTLIB_REPOSITORY": repository}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in directory.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return build(tmp_path_factory.mktemp("built"))


def metadata(wheel: Path) -> tuple[str, str]:
    """Its fields, and what an index shows."""
    with zipfile.ZipFile(wheel) as files:
        (found,) = (files.read(name).decode() for name in files.namelist() if name.endswith("METADATA"))
    head, _, text = found.partition("\n\n")
    return head, text


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
    head, text = metadata(built[".whl"])
    assert "Description-Content-Type: text/markdown" in head
    assert "Project-URL" not in head, "none is made up"
    assert not re.findall(r"\]\((?!https?:)[^)]*\)", text)
    assert "The upper half shows" in readme
    assert "The upper half shows" not in text, "what explains the picture"
    for part in ("survive any kill", "with ckptlib.Checkpointer(", "## Beside other libraries", "## Limits"):
        assert part in text
    assert len(text) > 0.7 * len(readme)


def test_a_release_leads_to_the_files_of_its_tag(tmp_path: Path) -> None:
    wheel = build(tmp_path, f"{ADDRESS}/", "-t", "wheel")[".whl"]
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    head, text = metadata(wheel)
    tag = f"v{ckptlib.__version__}"
    told = dict(re.findall(r"^Project-URL: (\w+), (.*)$", head, re.M))
    assert told.keys() == {"Homepage", "Documentation", "Changelog", "Issues"}
    paths = [address.removeprefix(f"{ADDRESS}/") for address in re.findall(r"\]\(([^)#]*)[^)]*\)", text)]
    paths += [told[name].removeprefix(f"{ADDRESS}/") for name in ("Documentation", "Changelog")]
    own = [path.split("/", 2) for path in paths if not path.startswith("https://")]
    assert len(own) > 10
    for kind, at, path in own:
        assert kind in ("blob", "raw", "tree")
        assert at == tag
        assert (ROOT / path).exists()
    assert "The upper half shows" in text, "what explains the picture"


def test_the_sdist_has_what_the_tests_need(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    for name in ("pyproject.toml", "FORMAT.md", "tests/conftest.py", "benchmarks/__main__.py", "docs/cli.md"):
        assert name in names


def test_versions_agree() -> None:
    version = ckptlib.__version__
    assert re.search(rf'^version = "{re.escape(version)}"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)
