"""The page of a real run, against files and json alone: a kill, a slow store, a failed save, a rewind, a lost host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.increments import body_of
from helpers.pages import Page, check_harmless
from helpers.reported import SLOW_S, make_run

STEPS = [(5, 1), (10, 1), (15, 1), (20, 2), (25, 2), (30, 2), (40, 2), (42, 2), (30, 3), (35, 3), (40, 3)]
"""And generations, by order; then those of the last start, whose interval follows from what saves cost."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("reported"))


@pytest.fixture(scope="module")
def page(root: Path) -> Page:
    out = root.parent / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "ckptlib.cli", "report", str(root), "-o", str(out)], capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return check_harmless(out.read_text(encoding="utf-8"))


def test_every_save(root: Path, page: Page) -> None:
    """Sizes are those of the files; the times until commits are those between the snapshots and the files' own."""
    rows = page.table("step", "generation", "taken (UTC)")
    numbers = {number: n for n, number in enumerate(sorted({int(row[1]) for row in rows}), 1)}
    told = [(int(row[0]), numbers[int(row[1])]) for row in rows]
    assert told[: len(STEPS)] == STEPS
    assert told[-1] == (70, 4)
    assert [row[9] for row in rows[5:8]] == ["left behind"] * 3
    assert {row[9] for row in rows[:5] + rows[8:]} == {""}
    persists = {}
    for row in rows:
        (path,) = (root / "steps").glob(f"{int(row[0]):012d}-{int(row[1]):06d}-*.json")
        packs = sum(p.stat().st_size for p in (root / "packs" / path.stem).glob("*"))
        assert row[5] == in_words(packs)
        assert row[4] == in_words(body_of(path)["nbytes_state"])
        seconds = path.stat().st_mtime - body_of(path)["created"]
        persists[int(row[0]), int(row[1])] = seconds
        assert in_seconds(row[8]) == pytest.approx(seconds, rel=0.1, abs=0.51)
    assert persists[20, int(rows[3][1])] > SLOW_S
    assert sum("taken over from" in title for title in page.titles) >= len(rows) - 1
    assert any("planes: " in title for title in page.titles)


def test_every_start(root: Path, page: Page) -> None:
    rows = page.table("generation", "began (UTC)", "host")
    assert [row[4].rpartition(" of ")[0] or row[4] for row in rows] == [
        *("began anew", "step 15", "went back to step 25", "step 25", "step 40"),
    ]
    assert [row[4].rpartition(", ")[2] for row in rows if row[4].startswith("step")] == ["read from the store"] * 3
    assert [row[6] for row in rows] == ["0 to 16", "15 to 42", "", "25 to 40", "40 to 70"]
    assert [row[7] for row in rows] == ["1", "17", "", "0", "0"]
    assert [row[10] for row in rows] == ["failed", "ended", "rewind", "not known", "ended"]
    goodput = json.loads(
        subprocess.run(
            [sys.executable, "-m", "ckptlib.cli", "goodput", str(root), "--json"], capture_output=True, timeout=120
        ).stdout
    )
    assert f"{100 * goodput['ettr']:.1f} % measured" in page.text
    assert "2 starts failed" in page.text
    assert "of 1 start no word came after the last save" in page.text
    assert "18 steps were lost" in page.text
    assert any("went back to step 25" in title for title in page.titles)


def test_the_save_that_failed(page: Page) -> None:
    (row,) = page.table("step", "generation", "last put (UTC)")
    assert row[0] == "35"
    assert row[5].startswith("rank 0: fault+file://")
    assert row[5].endswith("no space, as planned")


def test_the_interval(page: Page) -> None:
    """The one that is recorded with the first save under it, and why."""
    rows = page.table("first save", "generation", "before")
    assert rows[0][2] == ""
    assert int(rows[0][3]) > 0
    assert "a save costs" in rows[0][4] or "no save has been measured" in rows[0][4]


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(root: Path, page: Page, scheme: str) -> None:
    """It draws the page, with the same elements, and tells of no error."""
    out = root.parent / f"{scheme}.png"
    browser = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1240,2400"]
    browser += [f"--user-data-dir={root.parent / scheme}", "--enable-logging=stderr", "--v=0"]
    browser += [f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"]
    url = (root.parent / "report.html").as_uri()
    drawn = subprocess.run([*browser, f"--screenshot={out}", url], capture_output=True, timeout=120)
    assert drawn.returncode == 0
    assert b"CONSOLE" not in drawn.stderr
    assert out.stat().st_size > 50_000
    dump = subprocess.run([*browser, "--dump-dom", url], capture_output=True, timeout=120)
    seen = Page(dump.stdout.decode())
    assert [*filter(lambda name: name != "tbody", seen.tags)] == page.tags
    assert seen.titles == page.titles


UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}
SECONDS = {"ms": 1e-3, "s": 1, "min": 60}


def in_words(nbytes: int) -> str:
    """Three digits."""
    number, unit = next((nbytes / of, name) for name, of in reversed(UNITS.items()) if nbytes >= of or of == 1)
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"


def in_seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * SECONDS[unit]
