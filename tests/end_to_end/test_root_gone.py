"""A root that is removed, or whose file system is unmounted, below a live job: nothing is called saved meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from helpers.inside import writer_of
from helpers.writers import alive, until
from launch import fork_ranks

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
        if left == "nothing":
            assert not root.exists(), "`mv away root` would put it into what is there"
        else:
            assert not [path for path in root.rglob("*") if path.is_file() and path.name != "notes.txt"]
        if left == "another file":
            assert (root / "notes.txt").read_text() == "mine"
            shutil.rmtree(root)
        elif left == "an empty directory":
            root.rmdir()
        away.rename(root)
        save(4)
    assert [info.step for info in ckptlib.checkpoints(root)] == [1, 4]
    assert all(ckptlib.read(root, step=step)["w"].eq(step).all() for step in (1, 4))


def test_a_local_tier_drains_nothing_to_where_the_root_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It waits for the root, as for a store that is away: what lies below a mount point is lost when that is back."""
    root, away, w = tmp_path / "root", tmp_path / "away", torch.zeros(3000)
    with ckptlib.Checkpointer(root, {"w": w}, every=10**9, local=tmp_path / "disk") as ckpt:
        ckpt.save(1).wait_committed(PATIENCE_S)
        root.rename(away)
        w.fill_(2)
        pending = ckpt.save(2)
        until(lambda: pending.done() or root.exists() or "and waits for" in caplog.text)
        assert not root.exists()
        away.rename(root)
        pending.wait_committed(PATIENCE_S)
    assert ckptlib.read(root)["w"].eq(2).all()


@pytest.mark.parametrize("saves", [True, False])
def test_a_job_that_ends_leaves_nothing_where_the_root_was(tmp_path: Path, saves: bool) -> None:
    """Nor its account; also one that has saved nothing."""
    root, away = tmp_path / "root", tmp_path / "away"
    ckpt = ckptlib.Checkpointer(root, {"w": torch.zeros(3000)}, every=10**9)
    ckpt.restore()
    if saves:
        ckpt.save(1).wait_committed(PATIENCE_S)
    root.rename(away)
    writer = writer_of(ckpt).pid
    ckpt.close()
    until(lambda: not alive(writer))
    assert not root.exists()


def test_no_rank_leaves_anything_where_the_root_was(tmp_path: Path) -> None:
    """Also the ranks that never read the root's document."""
    fork_ranks("root_gone.py", 2, tmp_path, timeout_s=120)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["away"]
    with ckptlib.open(tmp_path / "away") as step:
        assert step.step == 1
