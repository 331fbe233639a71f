"""A restore of a root with many steps: what it takes grows with their number, not with the square of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib.format.keys import SaveId

NUM_STEPS = 1_000


def test_steps_are_compared_a_few_times_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    last = NUM_STEPS + 1
    with ckptlib.Checkpointer(root, {"x": torch.arange(4)}, every=ckptlib.Steps(last)) as ckpt:
        ckpt.save(last).result()
    (manifest,) = (root / "steps").iterdir()
    for step in range(1, last):  # no restore reads them: the newest one is whole
        (root / "steps" / f"{step:012d}{manifest.name[12:]}").write_bytes(b"{}")
    compared = 0
    equal = SaveId.__eq__

    def count(self: SaveId, other: object) -> bool:
        nonlocal compared
        compared += 1
        return equal(self, other)

    state = {"x": torch.zeros(4, dtype=torch.int64)}
    with ckptlib.Checkpointer(root, state, every=ckptlib.Steps(last)) as ckpt:
        monkeypatch.setattr(SaveId, "__eq__", count)
        assert ckpt.restore().step == last
        monkeypatch.undo()
    assert state["x"].tolist() == [0, 1, 2, 3]
    assert compared < 20 * NUM_STEPS
