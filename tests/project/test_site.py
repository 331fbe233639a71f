"""The site of the documents: it builds without a warning, and every link and picture on it leads somewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from places import ROOT

import ckptlib
from ckptlib import data, events


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    """scripts/site_pages.py"""
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "scripts" / "site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("README.md", "[a](docs/cli.md#plan)", "[a](cli.md#plan)"),
        ("README.md", "![a](benchmarks/glance.svg)", "![a](benchmarks/glance.svg)"),
        ("docs/dcp.md", "[`a[0]`](../README.md)", "[`a[0]`](index.md)"),
        ("docs/dcp.md", "[a](history.md), [b](#here)", "[a](history.md), [b](#here)"),
        ("docs/dcp.md", "[a](../FORMAT.md)", "[a](FORMAT.md)"),
        ("docs/dcp.md", "[a](../ckptlib/catalog/)", "a"),
        ("docs/dcp.md", "[a](https://x.example/docs/b.md)", "[a](https://x.example/docs/b.md)"),
        ("docs/dcp.md", "```\n[a](../FORMAT.md)\n```\n", "```\n[a](../FORMAT.md)\n```\n"),
        ("benchmarks/NOTES.md", "[a](../docs/codecs.md), [b](RESULTS.md)", "[a](../codecs.md), [b](RESULTS.md)"),
    ],
)
def test_links_are_led_to_the_site(pages: ModuleType, path: str, text: str, expected: str) -> None:
    assert pages.relinked(text, path) == expected


def test_places_have_paths(pages: ModuleType) -> None:
    for path in pages.needed():
        assert pages.path_of(pages.place_of(path)) == path


class Page(HTMLParser):
    """What a page links to, and the names that it can be linked by."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if value and key in ("href", "src"):
                self.targets.append(value)
            elif value and key in ("id", "name"):
                self.names.add(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="scripts/docs installs what builds the site")
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.mark.timeout(300)
def test_every_document_is_a_page(site: Path) -> None:
    for path in (ROOT / "docs").glob("*.md"):
        assert (site / f"{path.stem}.html").exists()
    assert "survive any kill" in (site / "index.html").read_text()


def test_nothing_is_broken_and_nothing_comes_from_elsewhere(site: Path) -> None:
    found = {path: Page(path.read_text()) for path in site.rglob("*.html") if path.name != "404.html"}
    broken = []
    for path, page in found.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if there.is_dir():
                there /= "index.html"
            anchor = unquote(parts.fragment)
            known = found[there].names if there in found else None
            if not there.exists() or (anchor and known is not None and anchor not in known):
                broken.append((path.name, target))
    assert not broken
    text = (site / "index.html").read_text()
    assert not re.findall(r'<(?:script|img)[^>]+src="https?:', text)
    assert not re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="https?:', text)


def test_the_reference_has_every_promised_name(site: Path) -> None:
    names = Page((site / "api.html").read_text()).names
    promised = {f"ckptlib.{name}" for name in ckptlib.__all__} - {f"ckptlib.{name}" for name in errors()}
    promised |= {f"ckptlib.data.{name}" for name in data.__all__}
    promised |= {f"ckptlib.events.{name}" for name in events.__all__}
    promised |= {f"ckptlib.errors.{name}" for name in errors()}
    assert promised - names == set()


def test_arguments_are_lists(site: Path) -> None:
    text = (site / "api.html").read_text()
    for argument in ("url", "save_deadline", "on_event"):
        assert f"<li><code>{argument}</code>: " in text


def errors() -> list[str]:
    return [
        name
        for name in ckptlib.__all__
        if isinstance(getattr(ckptlib, name), type) and getattr(ckptlib, name).__module__ == "ckptlib.errors"
    ]
