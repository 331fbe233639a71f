"""A root that is removed, and made anew by another job, while somebody still saves to it: the two are never mixed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.servers import ObjectStorage
from workers.crash_bench import Bench
from workers.crash_jobs import run, train

import ckptlib
from ckptlib.errors import SaveFailed, Superseded
from ckptlib.stores import open_store

PATIENCE_S = 60.0


Empty = Callable[[], object]
"""Removes the root, with all that is in it."""


def saved(url: Path | str, **given: Any) -> list[tuple[int, int]]:
    """Steps and their generations."""
    return [(info.step, info.generation) for info in ckptlib.checkpoints(url, **given)]


def go_on_in_the_root_of_another(url: Path | str, empty: Empty, **given: Any) -> None:
    w, other = torch.zeros(3000), torch.full([3000], -1.0)
    for step in (1, 2):  # the generation of the next job is not the first one, as that of a new root is
        with ckptlib.Checkpointer(url, {"w": w}, every=10**9, **given) as ckpt:
            ckpt.save(step)
    ckpt = ckptlib.Checkpointer(url, {"w": w}, every=10**9, **given)
    ckpt.restore()

    def save(step: int) -> None:
        w.fill_(step)
        ckpt.save(step).wait_committed(PATIENCE_S)

    save(100)
    empty()
    with ckptlib.Checkpointer(url, {"w": other}, every=10**9, **given) as young:
        with pytest.raises(SaveFailed, match="is not there any more: it has no record of generation"):
            save(101)  # nobody has saved to the new one yet
        young.save(1).wait_committed(PATIENCE_S)
        with pytest.raises(Superseded, match="another root is there now, without a record of generation"):
            save(102)
        with pytest.raises(Superseded):
            ckpt.close()
    assert saved(url, **given) == [(1, 1)]
    with ckptlib.Checkpointer(url, {"w": other.zero_()}, every=10**9, **given) as ckpt:
        assert ckpt.restore().step == 1
    assert other.eq(-1).all()


def test_a_job_that_goes_on_saves_nothing_into_the_root_of_another(tmp_path: Path) -> None:
    root = tmp_path / "root"
    go_on_in_the_root_of_another(root, lambda: shutil.rmtree(root))


@pytest.mark.slow
def test_nor_in_a_bucket(s3: ObjectStorage) -> None:
    url, options = s3.url(), s3.options()
    with open_store(url, options) as store:
        go_on_in_the_root_of_another(
            url, lambda: store.delete(*(entry.key for entry in store.scan(""))), storage_options=options
        )


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
