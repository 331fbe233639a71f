"""`ckptlib report`: the file that it writes, what it says of it, and what it leaves alone."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from helpers.commands import Ckptlib, files
from helpers.pages import check_harmless


def test_a_page(ckptlib: Ckptlib, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two generations and a rewind; the root is left as it was."""
    monkeypatch.chdir(tmp_path)
    before = files(saved)
    shown = ckptlib("report", saved)
    assert (shown.code, shown.err) == (0, "")
    assert "report.html: 3 steps" in shown.out
    page = check_harmless((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert files(saved) == before
    assert [
        "step",
        "generation",
        "taken (UTC)",
        "ranks",
        "logical",
        "written",
        "uses",
        "stall",
        "persist",
        "",
        "metrics",
    ] in page.rows
    rows = [row for row in page.rows if row[-1].startswith("loss")]
    assert [(row[0], row[1], row[3], row[9]) for row in rows] == [
        ("2", "1", "2", ""),
        ("4", "1", "2", "left behind"),
        ("3", "2", "1", ""),
    ]
    assert any("step 2 of generation 1" in row for row in page.rows)


def test_json_and_stdout(ckptlib: Ckptlib, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    found = ckptlib("report", saved, "-o", out, "--json").json
    assert found == {"out": str(out), "nbytes": out.stat().st_size, "steps": 3, "problems": []}
    assert check_harmless(ckptlib("report", saved, "-o", "-").out).tags.count("section") > 8
    assert ckptlib("report", saved, "-o", "-", "--json").code == 2


def test_damage(ckptlib: Ckptlib, root: Path, tmp_path: Path) -> None:
    manifest = sorted((root / "steps").glob("*.json"))[0]
    manifest.write_bytes(manifest.read_bytes()[:-30])
    found = ckptlib("report", root, "-o", tmp_path / "page.html")
    assert found.code == 1
    assert manifest.name in found.err.replace("\n", "")
    page = check_harmless((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert manifest.name in page.text


def test_a_place_where_it_cannot_write(ckptlib: Ckptlib, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "no" / "page.html", tmp_path / "file" / "page.html", tmp_path):
        found = ckptlib("report", saved, "-o", out)
        assert found.code == 1
        assert "cannot write the page" in found.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_a_place_that_is_no_file(ckptlib: Ckptlib, saved: Path) -> None:
    result = ckptlib("report", saved, "-o", "")
    assert result.code == 1
    assert "is no name of a file" in result.err


def test_no_root(ckptlib: Ckptlib, tmp_path: Path) -> None:
    found = ckptlib("report", tmp_path, "-o", tmp_path / "page.html")
    assert found.code == 1
    assert "holds no checkpoints" in found.err
    assert not (tmp_path / "page.html").exists()


def test_nothing_but_a_file_is_replaced(ckptlib: Ckptlib, saved: Path, tmp_path: Path) -> None:
    """As root, `-o /dev/null` would else take the device from the whole machine."""
    pipe, link, page = tmp_path / "pipe", tmp_path / "link.html", tmp_path / "page.html"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with open(reader, "rb", buffering=0) as read:
        fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
        assert ckptlib("report", saved, "-o", pipe).code == 0
        check_harmless((read.read(1 << 20) or b"").decode())
    assert pipe.is_fifo()
    page.write_text("of before")
    link.symlink_to(page.name)
    assert ckptlib("report", saved, "-o", link).code == 0
    assert link.is_symlink()
    check_harmless(page.read_text(encoding="utf-8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "page.html", "pipe"]
