"""`codec=` of save and save_async: as of a Checkpointer, and the same at every save of a process to a root."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.registry import close_sessions

import ckptlib
from ckptlib.catalog.catalog import Catalog
from ckptlib.stores import open_store

MOMENT = "state/0/exp_avg"


@pytest.fixture(autouse=True)
def own_sessions() -> Iterator[None]:
    yield
    close_sessions()


def state() -> dict[str, object]:
    torch.manual_seed(0)
    return {"model": torch.nn.Linear(700, 700), "state": {"0": {"exp_avg": torch.randn(700, 700) / 50}}}


def codecs(root: Path, step: int) -> dict[str, set[str]]:
    """By tensor."""
    catalog, found = Catalog(open_store(str(root), {})), dict[str, set[str]]()
    save = next(save for save in catalog.saves() if save.step == step)
    part = catalog.part(catalog.manifest(save).parts[0])
    layout = catalog.layout(part.table.layout)
    for shard, tensor in enumerate(part.table.tensors):
        of = {part.codings[chunk].codec if chunk in part.codings else "raw" for chunk in part.table.chunks(shard)}
        found.setdefault(layout.tensors[tensor].name, set()).update(of)
    return found


def test_is_what_tensors_are_stored_as(tmp_path: Path) -> None:
    codec = {"model/**": "planes", "state/**": ckptlib.Lossy(bits=8)}
    saved, loaded = state(), state()
    ckptlib.save(tmp_path, saved, 1, codec=codec)
    ckptlib.save_async(tmp_path, saved, 2, codec=codec).wait_committed()
    for step in (1, 2):
        assert codecs(tmp_path, step)["model/weight"] == {"planes"}
        assert codecs(tmp_path, step)[MOMENT] == {"lossy8-linear"}
    loaded["model"].weight.data.zero_()  # type: ignore[attr-defined]
    report = ckptlib.load(tmp_path, loaded)
    assert torch.equal(loaded["model"].weight, saved["model"].weight)  # type: ignore[attr-defined]
    assert report.rounded.keys() == {MOMENT}


def test_is_the_same_at_every_save(tmp_path: Path) -> None:
    ckptlib.save(tmp_path, state(), 1, codec="planes")
    for other in ("auto", {"model": "raw"}):
        with pytest.raises(ValueError, match=rf"step 2: codec={other!r}, but this process saves to .* codec='planes'"):
            ckptlib.save(tmp_path, state(), 2, codec=other)
    with pytest.raises(ValueError, match="codec='auto', but"):
        ckptlib.save(tmp_path, state(), 2)
    ckptlib.save(tmp_path, state(), 2, codec={"*": "planes"})
    assert [info.step for info in ckptlib.checkpoints(tmp_path)] == [1, 2]
    ckptlib.save(tmp_path / "other", state(), 1, codec="raw")


def test_another_process_may_choose_another(tmp_path: Path) -> None:
    ckptlib.save(tmp_path, state(), 1, codec="planes")
    close_sessions()
    saved = state()
    ckptlib.load(tmp_path, saved)
    ckptlib.save(tmp_path, saved, 2, codec="raw")
    assert [info.step for info in ckptlib.checkpoints(tmp_path)] == [1, 2]


@pytest.mark.parametrize("wrong", ["zstd", {"": "raw"}, {"a": "gzip"}, 7])
def test_what_nobody_can_mean_makes_no_root(tmp_path: Path, wrong: object) -> None:
    with pytest.raises((TypeError, ValueError), match="codec"):
        ckptlib.save(tmp_path / "root", state(), 1, codec=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "root").exists()


def test_default_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However little there is to decide for."""
    ckptlib.save(tmp_path, {"epoch": 3}, 1)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
