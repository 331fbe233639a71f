"""A root that is removed, and made anew by another job, while somebody still saves to it: the two are never mixed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from workers.crash_bench import Bench
from workers.crash_jobs import run, train

import ckptlib
from ckptlib.errors import SaveFailed, Superseded

PATIENCE_S = 60.0


def saved(root: Path) -> list[tuple[int, int]]:
    """Steps and their generations."""
    return [(info.step, info.generation) for info in ckptlib.checkpoints(root)]


def restored(root: Path) -> tuple[int, float]:
    """The step that another start of the new job goes on from, and its state."""
    w = torch.zeros(3000)
    with ckptlib.Checkpointer(root, {"w": w}, every=10**9) as ckpt:
        step = ckpt.restore().step
    return step, float(w.mean())


def test_a_job_that_goes_on_saves_nothing_into_the_root_of_another(tmp_path: Path) -> None:
    root, w, other = tmp_path / "root", torch.zeros(3000), torch.full([3000], -1.0)
    for step in (1, 2):  # the generation of the next job is not the first one, as that of a new root is
        with ckptlib.Checkpointer(root, {"w": w}, every=10**9) as ckpt:
            ckpt.save(step)
    ckpt = ckptlib.Checkpointer(root, {"w": w}, every=10**9)
    ckpt.restore()

    def save(step: int) -> None:
        w.fill_(step)
        ckpt.save(step).wait_committed(PATIENCE_S)

    save(100)
    shutil.rmtree(root)
    with ckptlib.Checkpointer(root, {"w": other}, every=10**9) as young:
        with pytest.raises(SaveFailed, match="is not there any more: it has no record of generation"):
            save(101)  # nobody has saved to the new one yet
        young.save(1).wait_committed(PATIENCE_S)
        with pytest.raises(Superseded, match="another root is there now, without a record of generation"):
            save(102)
        with pytest.raises(Superseded):
            ckpt.close()
    assert saved(root) == [(1, 1)]
    assert restored(root) == (1, -1.0)


@pytest.mark.parametrize(("op", "key"), [("commit", "^packs/"), ("put", "^parts/")])
def test_what_a_killed_job_has_left_unfinished_does_not_come_into_the_next_root(
    tmp_path: Path, op: str, key: str
) -> None:
    """Its writer goes on alone; meanwhile somebody has removed the root, and begun anew."""
    bench = Bench(tmp_path)
    bench.go_on()
    bench.go_on()
    (job,) = bench.start()
    job.wait_for("waiting")
    bench.fault({"op": op, "key": key, "action": "hold"})
    bench.open(3, "settle")
    bench.wait_for_fault(1)
    job.kill()
    bench.root.rename(tmp_path / "removed")
    run(train, tmp_path, url=str(bench.root), steps=3)  # the same state, in layouts that are there then
    bench.fault()
    job.join()
    job.join_writers()
    assert saved(bench.root) == [(1, 1), (2, 1), (3, 1)]
    (told,) = run(train, tmp_path, url=str(bench.root), steps=1)  # who finishes what dead jobs have left
    assert told[0]["step"] == 3
    assert saved(bench.root) == [(1, 1), (2, 1), (3, 1), (4, 2)]
