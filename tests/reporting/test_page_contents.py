"""What is stored as what and where, against documents that are read by json alone, and the sizes of files."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.increments import body_of, needed_ranges, save_steps

from ckptlib.catalog.catalog import Catalog
from ckptlib.reporting.gather import gather
from ckptlib.stores.local import LocalStore


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("contents") / "root"
    save_steps(root)
    return root


def test_bytes_are_those_of_the_documents_and_files(root: Path) -> None:
    found = gather(Catalog(LocalStore(str(root))))
    assert [step.save.step for step in found.steps] == [1, 2, 3, 4, 5]
    ranges = needed_ranges(root)
    for step in found.steps:
        content = step.content
        assert content is not None
        by_owner: dict[int, int] = {}
        for pack, of in ranges.items():
            owner = int(pack.split("/")[1].split("-")[0])
            nbytes = sum(stop - start for start, stop in of.get(step.save.step, []))
            by_owner[owner] = by_owner.get(owner, 0) + nbytes
        assert {save.step: nbytes for save, nbytes in content.packs.items()} == {n: b for n, b in by_owner.items() if b}
        assert content.taken_over.stored == sum(b for n, b in by_owner.items() if n != step.save.step)
        assert {*content.codecs} == {"raw"}
        assert content.codecs["raw"].stored == sum(by_owner.values()) == step.nbytes_state
        packs = (root / "packs" / str(step.save)).glob("*")
        assert step.nbytes == sum(path.stat().st_size for path in packs)
        assert step.created == body_of(root / "steps" / f"{step.save}.json")["created"]
    assert found.steps[1].content is not None
    assert found.steps[1].content.taken_over.stored > 0.5 * found.steps[1].nbytes_state
    assert found.nbytes_packs == sum(path.stat().st_size for path in (root / "packs").rglob("*") if path.is_file())


def test_of_too_many_parts_those_of_the_newest_steps_are_read(root: Path) -> None:
    found = gather(Catalog(LocalStore(str(root))), max_parts=2)
    assert [step.content is not None for step in found.steps] == [False, False, False, True, True]
    assert found.num_without_content == 3
    assert found.newest is not None
