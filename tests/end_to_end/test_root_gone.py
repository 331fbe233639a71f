"""A root that is removed, or whose file system is unmounted, below a live job: nothing is called saved meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib.errors import SaveFailed

PATIENCE_S = 60.0


@pytest.mark.parametrize("left", ["nothing", "an empty directory", "another file"])
def test_no_step_is_saved_to_where_the_root_was(tmp_path: Path, left: str) -> None:
    root, away, w = tmp_path / "root", tmp_path / "away", torch.zeros(3000)
    with ckptlib.Checkpointer(root, {"w": w}, every=10**9) as ckpt:

        def save(step: int) -> None:
            w.fill_(step)
            ckpt.save(step).wait_committed(PATIENCE_S)

        save(1)
        root.rename(away)
        if left != "nothing":
            root.mkdir()
        if left == "another file":
            (root / "lost+found").mkdir()
            (root / "notes.txt").write_text("mine")
        for step in (2, 3):
            with pytest.raises(SaveFailed, match=r"is not there any more: it has no ckptlib\.json"):
                save(step)
        assert not [*root.glob("steps/*")]
        assert not [*root.glob("packs/*")]
        if left == "another file":
            assert (root / "notes.txt").read_text() == "mine"
        shutil.rmtree(root)
        away.rename(root)
        save(4)
    assert [info.step for info in ckptlib.checkpoints(root)] == [1, 4]
    assert all(ckptlib.read(root, step=step)["w"].eq(step).all() for step in (1, 4))
