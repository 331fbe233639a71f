"""Steps that lack objects, as in a root that was copied while a job saved: no other one is dropped for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.registry import close_sessions

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.lacking import lacking
from ckptlib.catalog.retention import sweep
from ckptlib.catalog.stand import Stand
from ckptlib.errors import CkptError
from ckptlib.format.keys import GenerationId, PackSet, PartName, SaveId
from ckptlib.policy.keep import Keep
from ckptlib.stores import Entry, open_store


@pytest.fixture(autouse=True)
def _sessions() -> Iterator[None]:
    yield
    close_sessions()


def make(root: Path) -> None:
    """Four steps, of which each has one tensor that changes, and one that lies in the packs of the first; the last one
    has another layout."""
    state = {"frozen": torch.arange(50_000), "w": torch.zeros(50_000)}
    for step in (1, 2, 3, 4):
        state["w"].fill_(step)
        more = {"more": torch.ones(9)} if step == 4 else {}
        ckptlib.save(root, {**state, **more}, step, codec="raw")


def remove(root: Path, what: str) -> None:
    """Of the last step, and nothing that another one has."""
    others = {path.name for path in root.glob("layouts/*")}
    newest = "000000000004-*"
    if what == "layout":
        third = (root / next(root.glob("steps/000000000003-*"))).read_text()
        (name,) = [name for name in others if name.removesuffix(".json") not in third]
        (root / "layouts" / name).unlink()
        (root / "copies" / "layouts" / name).unlink()
        return
    found = sorted(root.glob(f"{what}/{newest}/*"))
    assert found
    found[0].unlink()


def readable(root: Path) -> list[int]:
    found = []
    for info in ckptlib.checkpoints(root):
        try:
            assert ckptlib.read(root, step=info.step)["w"].eq(info.step).all()
        except CkptError:
            continue
        found.append(info.step)
    return found


def swept(root: Path, keep: Keep, dry_run: bool = False) -> list[int]:
    """The steps that were dropped."""
    with open_store(str(root)) as store:
        return [save.step for save in sweep(Catalog(store), keep, None, dry_run=dry_run).dropped]


@pytest.mark.parametrize("what", ["packs", "parts", "layout"])
def test_no_step_is_dropped_for_one_that_lacks_objects(tmp_path: Path, what: str) -> None:
    make(tmp_path)
    assert readable(tmp_path) == [1, 2, 3, 4]
    remove(tmp_path, what)
    assert readable(tmp_path) == [1, 2, 3]
    assert swept(tmp_path, Keep(last=1), dry_run=True) == [1, 2]
    assert swept(tmp_path, Keep(last=1)) == [1, 2]
    assert readable(tmp_path) == [3]
    assert [info.step for info in ckptlib.checkpoints(tmp_path)] == [3, 4]  # the rest of the copy may yet come


def test_one_that_is_cut_lacks_bytes(tmp_path: Path) -> None:
    make(tmp_path)
    (pack,) = tmp_path.glob("packs/000000000004-*/*")
    pack.write_bytes(pack.read_bytes()[:-1])
    assert swept(tmp_path, Keep(last=1)) == [1, 2]


def test_packs_of_another_step(tmp_path: Path) -> None:
    """The last one uses packs of the one before, which are gone. The first has all of its own."""
    frozen = torch.arange(50_000)
    for step, more in ((1, {"more": torch.ones(9)}), (2, {}), (3, {})):
        ckptlib.save(tmp_path, {"frozen": frozen, "w": torch.full((50_000,), float(step)), **more}, step, codec="raw")
    for pack in tmp_path.glob("packs/000000000002-*/*"):
        pack.unlink()
    assert readable(tmp_path) == [1]
    assert swept(tmp_path, Keep(last=1)) == [2]
    assert readable(tmp_path) == [1]


@pytest.mark.parametrize("left", [(0, 1), (1,), (0,)])
def test_packs_of_another_step_of_the_rank_that_uses_them(left: tuple[int, ...]) -> None:
    """Those of the other rank may go, and are no sign that these are there."""
    first, second = (SaveId(step, GenerationId(1, "0" * 8)) for step in (1, 2))
    stand = Stand(0.0, 2, {PackSet(first): 0.0}, {PackSet(first): frozenset({1})}, 0, (), {}, exempt=False)
    packs = [Entry(first.pack_key(rank, "a77e3b70", 0), 1, 0.0) for rank in left]
    parts = [Entry(PartName(second, rank, "a77e3b70", "1" * 32, "2" * 32).key, 1, 0.0) for rank in range(2)]
    assert lacking({first: packs, second: parts}, (), {second: stand}) == (set() if 1 in left else {second})


def test_all_lack_objects(tmp_path: Path) -> None:
    """The rule is as ever."""
    make(tmp_path)
    for pack in tmp_path.glob("packs/*/*"):
        pack.unlink()
    assert swept(tmp_path, Keep(last=2)) == [1, 2]


def test_whole_ones_are_counted_as_ever(tmp_path: Path) -> None:
    make(tmp_path)
    assert swept(tmp_path, Keep(last=2)) == [1, 2]
    assert readable(tmp_path) == [3, 4]
