"""A root that holds checkpoints of other libraries is no fresh run without a word."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.one_job import Job
from torch.distributed import checkpoint as dcp
from typing_extensions import override

from ckptlib.errors import StoreError
from ckptlib.recovery.foreign import foreign, warn_of_foreign
from ckptlib.stores.fsspec import FsspecStore
from ckptlib.stores.local import LocalStore
from ckptlib.stores.memory import MemoryStore


def restored(root: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of a job that restores there, and begins anew."""
    job = Job(root)
    with job.checkpointer() as ckpt:
        assert ckpt.restore().step == 0
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_file_of_torch_save_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    root.mkdir()
    torch.save({"x": torch.ones(3)}, root / "ckpt.pt")
    (root / "notes.txt").write_text("not a checkpoint")
    assert restored(root, caplog) == [
        f"file://{root} holds no checkpoint of ckptlib, so this is a fresh run; but there are files that look like "
        "checkpoints: ckpt.pt (torch.save or Lightning). To go on from one of them: ckptlib import SRC URL"
    ]
    with Job(root).checkpointer() as ckpt:
        ckpt.save(1)
    caplog.clear()
    with Job(root).checkpointer() as ckpt:
        assert ckpt.restore().step == 1
    assert caplog.text == "", "nothing more is asked where there is a checkpoint of ours"


def test_a_directory_of_dcp_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    dcp.save({"x": torch.ones(3)}, checkpoint_id=root)
    (said,) = restored(root, caplog)
    assert ".metadata (torch.distributed.checkpoint), __0_0.distcp (torch.distributed.checkpoint)" in said


def test_a_fresh_root_is_nothing_to_tell_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert restored(tmp_path / "root", caplog) == []


def test_own_objects_are_none() -> None:
    packs = ["packs/000000000001-000001-00000000/000000-00000000-000000.safetensors", "ckptlib.json", "steps/1.json"]
    assert foreign(packs) == {}
    assert foreign(["model.safetensors", "a/b/packs.ckpt", "last.ckpt/x.txt", *packs]) == {
        "model.safetensors": "safetensors",
        "a/b/packs.ckpt": "torch.save or Lightning",
    }


def test_many_are_not_all_named(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    for i in range(9):
        store.put(f"run/{i}.pt", b"x")
    warn_of_foreign(store)
    assert "run/4.pt (torch.save or Lightning) and 4 more. To go on" in caplog.text
    assert "run/5.pt" not in caplog.text


def test_a_listing_that_fails_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Away(MemoryStore):
        @override
        def peek(self, most: int) -> list[str]:
            raise StoreError("away")

    warn_of_foreign(Away())
    assert "what else is there could not be looked at: away" in caplog.text


def test_fsspec_looks_no_deeper_than_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    with FsspecStore("memory://peeked/root", {}) as made:
        for key in ("a.pt", "packs/1/a.safetensors", "deep/er/b.pt"):
            made.put(key, b"x")
        for name in ("find", "walk", "glob"):
            monkeypatch.setattr(made._client.fs, name, None)
        assert made.peek(10) == ["a.pt"]
    with FsspecStore("memory://nothing-was-ever-here", {}) as empty:
        assert empty.peek(10) == []


def test_a_directory_is_looked_at_no_deeper_than_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be anybody's, with a million files below."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.pt").touch()
    for i in range(5):
        (tmp_path / f"{i}.pt").touch()

    def refuse(*args: Any) -> Any:
        raise AssertionError("walks all of it")

    monkeypatch.setattr(LocalStore, "_walk", refuse)
    with LocalStore(str(tmp_path)) as store:
        assert store.peek(100) == [f"{i}.pt" for i in range(5)]
        assert len(store.peek(3)) <= 3
    with LocalStore(str(tmp_path / "nowhere")) as store:
        assert store.peek(100) == []
