"""`ckptlib goodput` on roots of real jobs, with accounts, without them, and with damaged ones."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from helpers.commands import Ckptlib
from helpers.inside import stager_of
from helpers.stage import held
from places import ROOT

import ckptlib as library
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.goodput import Goodput, Spent
from ckptlib.cli.goodput import _print_sums
from ckptlib.cli.output import Output
from ckptlib.stores.local import LocalStore

OLD = Path(__file__).parents[1] / "data"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Of a job that was started twice, and saved at 5, 10, 15 and 20."""
    state = {"w": torch.zeros(4)}
    (tmp_path / "arena").mkdir()
    for total in (10, 20):
        with library.Checkpointer(tmp_path / "root", state, every=5, arena=tmp_path / "arena") as ckpt:
            for _ in ckpt.loop(ckpt.restore().step, total):
                state["w"] += 1
    return tmp_path / "root"


def accounts(root: Path) -> list[Path]:
    return sorted((root / "generations").glob("*.account"))


def test_a_run(ckptlib: Ckptlib, root: Path) -> None:
    found = ckptlib("goodput", root, "--json").json
    assert [(start["first"], start["last"], start["end"]) for start in found["starts"]] == [
        (0, 10, "closed"),
        (10, 20, "closed"),
    ]
    assert (found["failures"], found["saves"], found["mtbf_s"]) == (0, 4, None)
    assert sum(found["seconds"][name] for name in found["seconds"] if name != "total") == pytest.approx(
        found["seconds"]["total"]
    )
    assert found["ettr"] == pytest.approx(found["seconds"]["trained"] / found["seconds"]["total"])
    shown = ckptlib("goodput", root)
    assert shown.code == 0
    assert "failures: none" in shown.out
    assert "10 to 20" in shown.out


def test_a_wait_for_a_last_copy_counts_once(ckptlib: Ckptlib, tmp_path: Path) -> None:
    """Each loop of several waits, within `after_step`, for the copy of its last step."""
    weight = torch.nn.Parameter(torch.zeros(2**15))
    optim = torch.optim.SGD([weight], lr=0.1)
    with library.Checkpointer(tmp_path / "root", {"weight": weight, "optim": optim}, every=10) as ckpt:
        ckpt.restore()
        began = time.monotonic()
        for step in range(3):
            with held(stager_of(ckpt)) as gate:
                threading.Timer(0.2, gate.set).start()
                for _ in ckpt.loop(step, step + 1):
                    weight.sum().backward()
                    optim.step()
        took_s = time.monotonic() - began
        assert ckpt.fence_waited_s > 0  # less than three times 0.2 where this thread came late to its wait
    found = ckptlib("goodput", tmp_path / "root", "--json").json
    assert [(start["first"], start["last"]) for start in found["starts"]] == [(0, 3)]
    assert found["seconds"]["stalled"] < took_s


def test_a_host_that_was_lost_with_its_writer(ckptlib: Ckptlib, root: Path) -> None:
    """What the newest manifest of each start tells is known then."""
    whole = ckptlib("goodput", root, "--json").json["starts"]
    for path in accounts(root):
        path.unlink()
    found = ckptlib("goodput", root, "--json").json["starts"]
    for start, before in zip(found, whole, strict=True):
        assert (start["first"], start["last"], start["end"]) == (before["first"], before["last"], None)
        assert start["began"] == before["began"]
        assert start["seconds"]["trained"] == pytest.approx(before["seconds"]["trained"], abs=0.01)
    assert "1 start left no word of its end" in ckptlib("goodput", root).out


def test_the_next_start_puts_what_a_lost_one_had_told(root: Path, tmp_path: Path) -> None:
    for path in accounts(root):
        path.unlink()
    state = {"w": torch.zeros(4)}
    with library.Checkpointer(root, state, every=5, arena=tmp_path / "arena") as ckpt:
        for _ in ckpt.loop(ckpt.restore().step, 25):
            state["w"] += 1
    tell = [path.name.split("-")[0] for path in accounts(root)]
    assert tell == ["000002", "000003"]


def test_a_rewind_is_no_start(ckptlib: Ckptlib, root: Path) -> None:
    assert ckptlib("rewind", root, "10", "--yes").code == 0
    assert ckptlib("goodput", root, "--json").json["untold"] == []
    assert "without an account" not in ckptlib("goodput", root).out


def test_damage_is_named_and_hides_nothing_else(ckptlib: Ckptlib, root: Path) -> None:
    damaged = accounts(root)[0]
    damaged.write_bytes(damaged.read_bytes().replace(b"closed", b"dosed!"))
    found = ckptlib("goodput", root, "--json")
    assert found.code == 1
    assert [start["first"] for start in found.json["starts"]] == [0, 10]  # the first by its manifest
    assert damaged.name in found.json["problems"][0]
    assert damaged.name in ckptlib("goodput", root).err.replace("\n", "")


def test_what_is_wrong_orders_no_terminal_about(ckptlib: Ckptlib, root: Path, tmp_path: Path) -> None:
    """The path is in each problem that these two tell."""
    accounts(root)[0].write_bytes(b"no account")
    moved = root.rename(tmp_path / "root\x1b[2J")
    for command in (("goodput", moved), ("report", moved, "-o", tmp_path / "page.html")):
        shown = ckptlib(*command)
        assert shown.code == 1
        assert "\x1b" not in shown.err
        assert "root\\x1b[2J" in shown.err.replace("\n", "")


@pytest.mark.parametrize("version", ["written-by-0.1", "written-by-0.2"])
def test_roots_of_older_versions(ckptlib: Ckptlib, version: str) -> None:
    roots = [path.parent for path in (OLD / version).rglob("ckptlib.json")]
    assert roots
    for of in roots:
        shown = ckptlib("goodput", of)
        assert shown.code == 0, shown.err
        assert "no start of this run has left an account" in shown.out
        assert "without an account" in shown.out


def test_what_the_docs_show(capsys: pytest.CaptureFixture[str]) -> None:
    hours, stalled = 3600.0, 842 * 4.7
    spent = Spent(70.2 * hours, stalled, 2.9 * hours, 24 * 60.0, 4.1, 3.1 * hours)
    _print_sums(Output(as_json=False), Goodput((), spent, 73 * hours, stalled, 842, 11))
    shown = "".join(f"    {line}\n" if line else "\n" for line in capsys.readouterr().out.splitlines())
    assert shown in (ROOT / "docs" / "goodput.md").read_text(encoding="utf-8")


def test_no_root(ckptlib: Ckptlib, tmp_path: Path) -> None:
    shown = ckptlib("goodput", tmp_path)
    assert shown.code == 1
    assert "holds no checkpoints" in shown.err


def test_gc_and_verify_know_accounts(ckptlib: Ckptlib, root: Path) -> None:
    before = accounts(root)
    assert ckptlib("verify", root).code == 0
    assert ckptlib("gc", root, "--yes", "--keep-last", "1").code == 0
    assert accounts(root) == before
    assert len(Catalog(LocalStore(root)).generations.ids()) == 2
