"""Retention as a training loop sees it: the best step, exempt steps, pins while the writer sweeps and is killed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.inside import writer_of
from helpers.moody import Moody
from helpers.one_job import WAIT_S, Job, catalog, steps, wait_settled
from support import age

import ckptlib
from ckptlib.catalog.pins import pin
from ckptlib.catalog.retention import sweep
from ckptlib.errors import CheckpointNotFound, CkptError, UnsupportedState
from ckptlib.format.keys import SaveId
from ckptlib.policy.keep import GRACE
from ckptlib.stores.local import LocalStore
from ckptlib.stores.testing import write_plan

LATER_S = GRACE.total_seconds() + 3600
KEEP = ckptlib.Keep(last=1, best="val_loss", mode="min")


def train(job: Job, losses: Mapping[int, object], keep: ckptlib.Keep = KEEP, first: int = 0, **options: object) -> None:
    """Saves at each step up to the last one that has a loss."""
    with job.checkpointer(every=1, keep=keep, **options) as ckpt:
        ckpt.restore()
        for step in ckpt.loop(first, max(losses)):
            job.body()
            if step + 1 in losses:
                ckpt.log({"val_loss": losses[step + 1]})
            ckpt.pending and ckpt.pending.wait_committed(WAIT_S)


def swept(job: Job, keep: ckptlib.Keep) -> list[int]:
    """The steps that stay. A job's last sweep may not have been, when it closed."""
    sweep(catalog(job.root), keep, None)
    return steps(job.root)


def loaded(job: Job, **which: object) -> tuple[int, list[bytes]]:
    """A step, in other objects."""
    into = Job(job.root, seed=9)
    report = ckptlib.load(job.root, into.state, **which)  # type: ignore[arg-type]
    return report.step, into.bits()


def test_a_job_that_may_not_delete_keeps_all_steps(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a bucket that nobody shall empty; it could not start before."""
    write_plan(tmp_path / "plan", [{"op": "delete", "action": "denied"}])
    url = f"fault+file://{job.root}?plan={tmp_path}/plan"
    with ckptlib.Checkpointer(url, job.state, every=1, keep=KEEP, arena=tmp_path) as ckpt:
        assert "All steps stay, whatever keep= says, and each start leaves an object below probe/" in caplog.text
        ckpt.restore()
        for step in ckpt.loop(0, 3):
            job.body()
            ckpt.log({"val_loss": step})
            ckpt.pending and ckpt.pending.wait_committed(WAIT_S)
    assert steps(job.root) == [1, 2, 3]
    assert len([*(job.root / "probe").iterdir()]) == 1


def test_the_best_step_stays_and_is_loaded(job: Job) -> None:
    bits: dict[int, list[bytes]] = {}
    losses = {1: 5.0, 2: np.float32(1.5), 3: float("nan"), 4: 3, 5: float("inf")}
    with job.checkpointer(every=1, keep=KEEP) as ckpt:
        for step in ckpt.loop(0, 5):
            job.body()
            bits[step + 1] = job.bits()
            ckpt.log({"val_loss": 7.0, "other": 1.0})
            ckpt.log({"val_loss": losses[step + 1]})
            ckpt.pending and ckpt.pending.wait_committed(WAIT_S)
    assert swept(job, KEEP) == [2, 5]
    assert loaded(job, step="best") == (2, bits[2])
    assert loaded(job, step="best", metric="val_loss", mode="max") == (5, bits[5])
    assert [info.metrics["other"] for info in ckptlib.checkpoints(job.root)] == [1.0, 1.0]
    with pytest.raises(CheckpointNotFound, match=r"no step with a number as metric 'acc'.*'other', 'val_loss'"):
        loaded(job, step="best", metric="acc", mode="max")


def test_after_step_tells_metrics_and_those_of_another_step_do_not_count(job: Job) -> None:
    with job.checkpointer(every=2, keep=KEEP) as ckpt:
        for step in range(1, 5):
            job.body()
            ckpt.log({"val_loss": float(step), "logged": step})
            ckpt.after_step(step, metrics={"val_loss": 10.0 * step})
            wait_settled(ckpt)
        ckpt.log({"val_loss": 0.5})
        ckpt.save(5).wait_committed(WAIT_S)
    found = {info.step: dict(info.metrics) for info in ckptlib.checkpoints(job.root)}
    assert found[5] == {"val_loss": 0.5}
    assert found.get(4, {"val_loss": 40.0, "logged": 4}) == {"val_loss": 40.0, "logged": 4}


def test_metrics_of_a_step_that_raised_do_not_count_for_the_next_one(job: Job) -> None:
    job.state["moody"] = moody = Moody()
    with job.checkpointer(every=1) as ckpt:
        moody.raises = OSError("a file that is not there")
        ckpt.log({"val_loss": 0.5})
        with pytest.raises(OSError, match="a file that is not there"):
            ckpt.after_step(1)
        moody.raises = None
        ckpt.log({"other": 2.0})
        ckpt.after_step(2)
        wait_settled(ckpt)
    assert {info.step: dict(info.metrics) for info in ckptlib.checkpoints(job.root)} == {2: {"other": 2.0}}


def test_what_is_exempt_survives_the_job_that_said_so(job: Job) -> None:
    train(job, dict.fromkeys(range(1, 5), 1.0), ckptlib.Keep(last=1, exempt=lambda step: step == 2))
    train(job, dict.fromkeys(range(5, 7), 1.0), ckptlib.Keep(last=1), first=4)
    assert swept(job, ckptlib.Keep(last=1)) == [2, 6]
    assert loaded(job, step=2)[0] == 2
    sweep(catalog(job.root), ckptlib.Keep(last=1), None, exempt=True)
    assert steps(job.root) == [6]


def test_each_save_of_a_script_has_its_own_predicate(tmp_path: Path) -> None:
    for step in range(1, 5):
        keep = ckptlib.Keep(last=9, exempt=lambda other, own=step: own == other == 2)
        ckptlib.save(tmp_path, {"w": torch.zeros(1)}, step, keep=keep)
    found = catalog(tmp_path)
    assert [found.stand(save).exempt for save in found.saves()] == [False, True, False, False]


def test_a_predicate_that_fails_loses_neither_save_nor_step(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    train(job, {1: 1.0, 2: 1.0, 3: 1.0}, ckptlib.Keep(last=1, exempt=lambda step: 1 // (step - 2) > 9))
    assert swept(job, ckptlib.Keep(last=1)) == [2, 3]
    assert "Keep(exempt=...) failed for step 2, which is kept for good: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("loss", [None, float("nan")])
def test_a_metric_that_never_comes_is_told_once(job: Job, loss: object, caplog: pytest.LogCaptureFixture) -> None:
    keep = ckptlib.Keep(last=2, best="val_loss", mode="min")
    train(job, {step: {"other": 1} if loss is None else loss for step in range(1, 7)}, keep)
    assert caplog.text.count("Keep(best='val_loss'): no step up to 3 was saved with a number as that metric") == 1
    assert swept(job, keep) == [5, 6]


def test_a_metric_that_comes_is_not_told_of(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    train(job, {1: "none", 2: 1.0, 3: "none", 4: "none", 5: "none", 6: "none"})
    assert "Keep(best" not in caplog.text


def test_what_is_wrong_is_told_before_anything_is_done(job: Job) -> None:
    with pytest.raises(ValueError, match=r"give both, with step='best'"):
        ckptlib.load(job.root, {}, step=5, metric="val_loss", mode="min")
    with pytest.raises(ValueError, match=r"expected mode='min'.*got None"):
        ckptlib.load(job.root, {}, step="best", metric="val_loss")
    train(job, {1: 1.0}, ckptlib.Keep())
    with pytest.raises(CheckpointNotFound, match=r"no job has recorded by which metric.*metric='val_loss', mode='min'"):
        loaded(job, step="best")
    with job.checkpointer() as ckpt, pytest.raises(UnsupportedState, match=r"metrics\[val_loss\]"):
        ckpt.log({"val_loss": torch.tensor(1.0)})


@pytest.mark.parametrize("num_steps", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_pins_hold_while_the_writer_sweeps_and_is_killed(job: Job, num_steps: int) -> None:
    """Each step is pinned while the writer, which has just committed the next one, may be dropping it."""
    chance = random.Random(7)
    bits: dict[int, list[bytes]] = {}
    held: list[SaveId] = []
    kills = 0
    store = LocalStore(str(job.root))
    with job.checkpointer(every=1, keep=ckptlib.Keep(last=1)) as ckpt:
        for step in ckpt.loop(0, num_steps):
            job.body()
            bits[step + 1] = job.bits()
            if ckpt.pending is None:
                continue
            wait_settled(ckpt)
            saves = catalog(job.root).saves()
            pid, after = writer_of(ckpt).pid, chance.choice([None, 0.0, 0.002, 0.005])
            killer = None
            if after is not None:
                killer = threading.Thread(target=_kill, args=(pid, after))
                killer.start()
                kills += 1
            for save in saves[-2:-1]:
                time.sleep(chance.random() * 0.006)
                with suppress(CkptError):
                    pin(catalog(job.root), save, patience_s=0.02)
                    held.append(save)
            if killer is not None:
                killer.join()
    for _ in range(3):
        sweep(catalog(job.root), ckptlib.Keep(last=1), None)
        age(store, LATER_S)
    assert {save.step for save in held} | {num_steps} <= {*steps(job.root)}
    assert kills >= num_steps // 3
    for save in held:
        assert loaded(job, step=save.step) == (save.step, bits[save.step])


def _kill(pid: int, after_s: float) -> None:
    time.sleep(after_s)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
