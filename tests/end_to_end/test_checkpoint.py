"""save, save_async, load and checkpoints of one process: which steps there are, and what is refused."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onerank import Root, opened

import ckptlib
from ckptlib import (
    CheckpointNotFound,
    CorruptData,
    SaveFailed,
    StateMismatch,
    UnsupportedState,
    checkpoint,
)
from ckptlib.format import documents
from ckptlib.reading.committed import Committed
from ckptlib.stores.testing import flip_bit, write_plan

# -- what is too large


def test_a_value_too_large_for_a_document_is_refused_by_name(root: Root) -> None:
    seen = np.zeros(2**29 + 1, np.uint8)  # pages that nobody touches
    with pytest.raises(UnsupportedState, match=r"replay\[0\]\.seen: 536,870,913 bytes are too many for a value"):
        root.save({"replay": [{"seen": seen}], "w": torch.ones(1)})


def test_values_too_large_together_fail_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_BYTES", 100_000)
    with (
        opened(tmp_path) as root,
        pytest.raises(SaveFailed, match=r"the snapshot would have 12.,... bytes; a document has at most 100,000"),
    ):
        root.save({"w": torch.ones(1), **{f"v{i}": "x" * 10_000 for i in range(12)}})


# -- saves


def test_a_save_is_of_the_moment_of_its_call(tmp_path: Path) -> None:
    with opened(tmp_path) as root:
        weight, note = torch.zeros(300, 1031), {"n": 1}
        pending = []
        for step in range(1, 6):
            weight.fill_(step)
            note["n"] = step
            pending.append(ckptlib.save_async(root.url, {"w": weight, "t": weight.t(), "note": note}, step))
        weight.fill_(-1)
        for save in pending:
            save.wait_committed(60)
            assert save.committed
        for step in range(1, 6):
            target = {"w": torch.zeros(300, 1031), "t": torch.zeros(1031, 300), "note": {"n": 0}}
            ckptlib.load(root.url, target, step)
            assert target["note"] == {"n": step}
            assert (target["w"] == step).all()  # type: ignore[attr-defined]
            assert (target["t"] == step).all()  # type: ignore[attr-defined]


def test_steps_are_listed_and_found(tmp_path: Path) -> None:
    assert list(ckptlib.checkpoints(tmp_path / "nothing")) == []
    with opened(tmp_path / "root") as root:
        target = {"a": 0}
        with pytest.raises(CheckpointNotFound, match=r"no ckptlib.json\. Is this a run's URL"):
            ckptlib.load(root.url, target)
        for step in (0, 7, 30):
            ckptlib.save(root.url, {"a": step}, step, metrics={"loss": step / 2})
        found = list(ckptlib.checkpoints(root.url))
        assert [(info.step, info.metrics["loss"], info.world_size) for info in found] == [
            (0, 0, 1),
            (7, 3.5, 1),
            (30, 15, 1),
        ]
        assert ckptlib.load(root.url, target).step == 30
        assert ckptlib.load(root.url, target, 7).step == 7
        assert ckptlib.load(root.url, target, found[0].name).step == target["a"] == 0
        with pytest.raises(CheckpointNotFound, match="no step 8; the last ones are: 0, 7, 30"):
            ckptlib.load(root.url, target, 8)
        assert target == {"a": 0}


def test_a_job_that_goes_back_leaves_the_later_steps_behind(tmp_path: Path) -> None:
    """In one process: the latest step is the one that was saved last, and not the one of the highest number."""
    with opened(tmp_path) as root:
        for step in (10, 20, 30):
            ckptlib.save(root.url, {"a": step}, step)
        with pytest.raises(ValueError, match="step 15 does not come after step 30"):
            ckptlib.save(root.url, {"a": 15}, 15)
        target = {"a": 0}
        ckptlib.load(root.url, target, 10)
        ckptlib.save(root.url, {"a": 16}, 15)
        assert [info.step for info in ckptlib.checkpoints(root.url)] == [10, 15]
        ckptlib.save(root.url, {"a": 21}, 20)
        assert (ckptlib.load(root.url, target).step, target["a"]) == (20, 21)
        assert [info.step for info in ckptlib.checkpoints(root.url)] == [10, 15, 20]
        with pytest.raises(ValueError, match="does not come after step 20"):
            ckptlib.save(root.url, {"a": 15}, 15)


def test_to_look_at_an_older_step_is_not_to_go_back(tmp_path: Path) -> None:
    with opened(tmp_path) as root:
        for step in (10, 20, 30):
            ckptlib.save(root.url, {"a": step}, step)
        ckptlib.load(root.url, {"a": 0}, 10)
        ckptlib.save(root.url, {"a": 40}, 40)
        assert [info.step for info in ckptlib.checkpoints(root.url)] == [10, 20, 30, 40]


def test_a_step_is_saved_once_and_refused_states_leave_nothing(tmp_path: Path) -> None:
    with opened(tmp_path) as root:
        root.save({"a": 1})
        with pytest.raises(ValueError, match="step 1 does not come after step 1"):
            ckptlib.save(root.url, {"a": 2}, 1)
        with pytest.raises(ValueError, match="between 0 and"):
            ckptlib.save(root.url, {"a": 2}, -1)
        with pytest.raises(TypeError, match="a dict of what to save"):
            ckptlib.save(root.url, [1, 2], 2)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="is reserved for ckptlib"):
            ckptlib.save(root.url, {"@rng": 2}, 2)
        with pytest.raises(UnsupportedState, match="f: cannot save"):
            ckptlib.save(root.url, {"a": torch.ones(2), "f": lambda: 0}, 2)
        assert [info.step for info in ckptlib.checkpoints(root.url)] == [1]
        root.save({"a": 2})
        assert [info.step for info in ckptlib.checkpoints(root.url)] == [1, 2]


@pytest.mark.parametrize("step", [1.0, float("nan"), "3", None, [1], True])
def test_a_step_is_an_int(tmp_path: Path, step: Any) -> None:
    told = rf"step={re.escape(repr(step))}: expected a whole number, not a {type(step).__name__}"
    with opened(tmp_path) as root:
        for save in (ckptlib.save, ckptlib.save_async):
            with pytest.raises(TypeError, match=told):
                save(root.url, {"a": 2}, step)
        with ckptlib.Checkpointer(root.url, {"a": 2}, every=1) as ckpt:
            for call in (ckpt.after_step, ckpt.save):
                with pytest.raises(TypeError, match=told):
                    call(step)
        assert list(ckptlib.checkpoints(root.url)) == []
        root.save({"a": 2})
        with pytest.raises(CheckpointNotFound if isinstance(step, str) else TypeError):
            ckptlib.load(root.url, {"a": 2}, step)


def test_a_failed_save_says_so_and_is_not_listed(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    write_plan(plan, [{"op": "commit", "key": "packs/0{11}2-", "action": "full"}])
    url = f"fault+file://{tmp_path}/root?plan={plan}"
    root = Root(tmp_path / "root")
    root.url = url
    try:
        root.save({"a": torch.ones(3)})
        pending = ckptlib.save_async(url, {"a": torch.zeros(3)}, 2)
        with pytest.raises(SaveFailed, match="no space"):
            pending.wait_committed(60)
        with pytest.raises(SaveFailed):
            pending.wait_committed(60)
        assert not pending.committed
        ckptlib.save(url, {"a": torch.ones(3)}, 3)
        assert [info.step for info in ckptlib.checkpoints(url)] == [1, 3]
    finally:
        root.close()


def test_altered_bytes_name_their_tensor(tmp_path: Path) -> None:
    with opened(tmp_path) as root:
        root.save({"model": {"w": torch.randn(300, 1031), "b": torch.randn(7)}})
        part, layout = root.saved()
        table = part.table
        for name in ("model/w", "model/b"):
            shard = next(s for s, t in enumerate(table.tensors) if layout.tensors[t].name == name)
            chunk = table.first_chunks[shard]
            path = root.path / part.packs[table.packs[chunk]].key
            flip_bit(path, table.offsets[chunk] + table.nbytes[chunk] // 2)
            with pytest.raises(CorruptData, match=rf"{name}\[0:\d+.*{part.packs[0].key}.*does not match"):
                root.load({"model": {"w": torch.zeros(300, 1031), "b": torch.zeros(7)}})
            flip_bit(path, table.offsets[chunk] + table.nbytes[chunk] // 2)
        root.load({"model": {"w": torch.zeros(300, 1031), "b": torch.zeros(7)}})


@pytest.mark.parametrize("quick", [True, False])
def test_garbage_is_collected_again_after_a_load_and_during_a_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: bool
) -> None:
    saved = {"a": torch.randn(1000), "b": torch.randn(9)}
    nbytes = sum(tensor.nbytes for tensor in saved.values())
    monkeypatch.setattr(checkpoint, "QUICK_BYTES", nbytes if quick else nbytes - 1)
    read_into, seen = Committed.read_into, {}

    def read(source: Committed, pack: str, offset: int, buffer: memoryview) -> None:
        seen["read"] = gc.isenabled()
        read_into(source, pack, offset, buffer)

    def name(path: str) -> str:
        seen["plan"] = gc.isenabled()
        return path

    monkeypatch.setattr(Committed, "read_into", read)
    with opened(tmp_path) as root:
        root.save(saved)
        root.load({"a": torch.zeros(1000), "b": torch.zeros(9)}, map=name)
        assert seen == {"plan": False, "read": not quick}
        assert gc.isenabled()
        with pytest.raises(StateMismatch):
            root.load({"a": torch.zeros(1001)}, map=name)
        assert gc.isenabled()
        gc.disable()
        try:
            root.load({"a": torch.zeros(1000), "b": torch.zeros(9)}, map=name)
            assert seen == {"plan": False, "read": False}
            assert not gc.isenabled()
        finally:
            gc.enable()
