"""Objects that somebody deletes below a live job: what it saves afterwards loads, and is on the job's history."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import ckptlib
from ckptlib.errors import ObjectNotFound

PATIENCE_S = 60.0


@pytest.mark.parametrize("tier", [False, True], ids=["straight", "by a local disk"])
def test_what_is_saved_after_packs_were_deleted_loads(
    tmp_path: Path, tier: bool, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    state = {"base": torch.arange(100_000.0), "lora": torch.zeros(1000)}
    local = tmp_path / "disk" if tier else None
    with ckptlib.Checkpointer(root, state, every=10**9, local=local) as ckpt:

        def save(step: int) -> int:
            """Bytes of its pack."""
            state["lora"].fill_(step)
            ckpt.save(step).wait_committed(PATIENCE_S)
            [packs] = root.glob(f"packs/{step:012d}-*")
            return size(packs)

        def save_small(step: int) -> int:
            """The first step from this one on that refers to an earlier one: by a disk, not before that was seen to be
            committed, which may be behind the commit."""
            while save(step) > 40_000:
                step += 1
            return step

        save(1)
        small = save_small(2)
        for step in range(1, small):
            [packs] = root.glob(f"packs/{step:012d}-*")
            shutil.rmtree(packs)
        save(small + 1)
        last = save_small(small + 2)
    assert "the writer process of rank 0: " in caplog.text
    assert "not there any more" in caplog.text
    for step in range(small + 1, last + 1):
        found = ckptlib.read(root, step=step)
        assert found["base"].equal(torch.arange(100_000.0))
        assert found["lora"].eq(step).all()
    if tier:  # the disk had them
        assert ckptlib.read(root, step=small)["base"].equal(torch.arange(100_000.0))
    else:
        with pytest.raises(ObjectNotFound, match="packs/000000000001-"):
            ckptlib.read(root, step=small)["base"]


@pytest.mark.parametrize("killed", ["", "before", "at once"])
@pytest.mark.parametrize("restores", [True, False])
def test_a_lost_record_of_the_job_itself_is_put_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restores: bool, killed: str
) -> None:
    """Without it history would end there, and the steps of the job before be gone from view. `restores`: else the job
    goes on from what is there, without a word. `killed`: its writer, before a save or as the record is lost."""
    root, w = tmp_path / "root", torch.zeros(3000)

    def save(ckpt: ckptlib.Checkpointer, step: int) -> None:
        w.fill_(step)
        ckpt.save(step).wait_committed(PATIENCE_S)

    with ckptlib.Checkpointer(root, {"w": w}, every=10**9) as ckpt:
        save(ckpt, 1)
    with ckptlib.Checkpointer(root, {"w": w}, every=10**9) as ckpt:
        if restores:
            assert ckpt.restore().step == 1
        save(ckpt, 2)
        if killed:
            os.kill(ckpt._session.writer.pid, signal.SIGKILL)
        if killed == "before":
            save(ckpt, 3)
        [record] = root.glob("generations/000002-*.json")
        was = record.read_bytes()
        for path in (record, root / "copies" / "generations" / record.name):
            path.unlink()
        save(ckpt, 4)
        assert record.read_bytes() == (root / "copies" / "generations" / record.name).read_bytes()
        assert killed == "at once" or record.read_bytes() == was
    told = f"{record.stem}, without which nobody knows what came before it, is not there any more"
    assert killed == "at once" or told in caplog.text
    assert [info.step for info in ckptlib.checkpoints(root) if info.visible] == [1, 2, *[3] * (killed == "before"), 4]


def size(packs: Path) -> int:
    return sum(path.stat().st_size for path in packs.iterdir())
