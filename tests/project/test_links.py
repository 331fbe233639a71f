"""What the documents link to is there: files, and headings by the names that GitHub gives them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from places import ROOT

from benchmarks.glance import PICTURE, draw

DOCUMENTS = [
    pytest.param(path, id=path.relative_to(ROOT).as_posix())
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def prose(path: Path) -> str:
    """Without what is code."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", lambda code: re.sub(r"[\[\]()]", "", code[0]), text)


def anchors(path: Path) -> set[str]:
    """GitHub's: lower case, punctuation left out, blanks as hyphens."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.+?) *$", text, re.M)
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        place, _, anchor = target.partition("#")
        found = (path.parent / place).resolve() if place else path
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
    assert not broken


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[^)#]+)", prose(ROOT / "README.md")))
    assert linked == {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


def test_the_picture_shows_what_was_measured() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    remedy = "python -m benchmarks.glance draws it anew"
    assert PICTURE.read_text(encoding="utf-8") == draw(results), remedy
