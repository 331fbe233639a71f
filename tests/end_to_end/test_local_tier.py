"""A job with a local tier: what is on its disk, what is in the bucket, and what it comes back from."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from helpers.increments import body_of
from helpers.one_job import WAIT_S, Job, catalog, steps
from workers.crash_oracle import read_root

import ckptlib
from ckptlib.catalog.retention import sweep
from ckptlib.errors import SaveFailed, StoreError
from ckptlib.events import Begun, Event, Restored
from ckptlib.stores.testing import flip_bit

BEST = ckptlib.Keep(last=1, best="val_loss", mode="min")


class Tiered:
    """A job, its bucket, behind faults that a test may switch on, and its disk."""

    def __init__(self, directory: Path) -> None:
        self.bucket, self.disk, self.plan = directory / "bucket", directory / "disk", directory / "plan.json"
        self.job = Job(self.bucket)
        self.url = f"fault+file://{self.bucket}?plan={quote(str(self.plan))}"

    def away(self, is_away: bool, keys: str = "packs|parts|steps") -> None:
        """Whatever is put under these keys is refused from now on, or no more."""
        rules = [{"op": op, "action": "error", "key": f"^({keys})"} for op in ("put", "write", "commit")]
        self.plans(*(rules if is_away else []))

    def plans(self, *rules: Mapping[str, object]) -> None:
        """The faults from now on."""
        temporary = self.plan.with_suffix(".new")
        temporary.write_text(json.dumps(rules))
        temporary.rename(self.plan)

    def open(self, job: Job | None = None, **options: object) -> ckptlib.Checkpointer:
        arena = self.bucket.parent
        state = (job or self.job).state
        return ckptlib.Checkpointer(self.url, state, **{"every": 1, "local": self.disk, "arena": arena, **options})

    def saved(self, ckpt: ckptlib.Checkpointer, step: int) -> ckptlib.Pending:
        """One step, saved on the disk."""
        self.job.body()
        ckpt.after_step(step)
        assert ckpt.pending is not None
        assert ckpt.pending.step == step
        ckpt.pending.wait_local(WAIT_S)
        return ckpt.pending

    def on_disk(self) -> list[int]:
        return sorted(int(path.name.split("-")[0]) for path in self.disk.glob("parts/*"))

    def same_bytes(self, step: int) -> None:
        """What the bucket has of a step's own objects, the disk has, too."""
        keys = [
            p.relative_to(self.bucket) for d in ("packs", "parts") for p in self.bucket.glob(f"{d}/{step:012d}-*/*")
        ]
        assert {key.parts[0] for key in keys} == {"packs", "parts"}
        for key in keys:
            assert (self.bucket / key).read_bytes() == (self.disk / key).read_bytes()


@pytest.fixture
def tiered(tmp_path: Path) -> Tiered:
    return Tiered(tmp_path)


def test_every_save_is_on_the_disk_and_what_is_drained_has_the_same_bytes_in_the_bucket(tiered: Tiered) -> None:
    with tiered.open(drain=ckptlib.Steps(2), local_keep=10) as ckpt:
        for step in range(1, 6):
            pending = tiered.saved(ckpt, step)
            assert pending.drains == (step % 2 == 0)
            if pending.drains:
                pending.wait_committed(WAIT_S)
                tiered.same_bytes(step)
            else:
                with pytest.raises(SaveFailed, match=f"step {step} stays on local disks and is never committed"):
                    pending.wait_committed(WAIT_S)
    assert steps(tiered.bucket) == [2, 4]
    assert [step.number for step in read_root(tiered.bucket)] == [2, 4], "whole, as an oracle reads it"
    assert tiered.on_disk() == [1, 2, 3, 4, 5]
    assert not list(tiered.disk.glob("steps/*")), "only the bucket has manifests"
    assert (tiered.disk / "ckptlib.json").read_bytes() == (tiered.bucket / "ckptlib.json").read_bytes()


def test_the_last_step_of_a_loop_and_what_save_takes_are_drained_whatever_the_policy_says(tiered: Tiered) -> None:
    with tiered.open(drain=ckptlib.Steps(1000)) as ckpt:
        for _ in ckpt.loop(0, 3):
            tiered.job.body()
    assert steps(tiered.bucket) == [3]
    with tiered.open(drain=ckptlib.Steps(1000)) as ckpt:
        assert ckpt.restore().step == 3
        ckpt.save(4).wait_committed(WAIT_S)
    assert steps(tiered.bucket) == [3, 4]


def test_a_disk_that_is_gone_is_told_of_once_and_no_step_is_lost_with_it(
    tiered: Tiered, caplog: pytest.LogCaptureFixture
) -> None:
    with tiered.open(drain=ckptlib.Steps(1)) as ckpt:
        tiered.saved(ckpt, 1).wait_committed(WAIT_S)
        assert "is not there any more" not in caplog.text
        tiered.disk.rename(tiered.disk.with_name("away"))
        for step in (2, 3):
            tiered.saved(ckpt, step).wait_committed(WAIT_S)
        assert caplog.text.count(f"local={tiered.disk} is not there any more: it has no ckptlib.json") == 1
    assert [step.number for step in read_root(tiered.bucket)] == [1, 2, 3], "whole, as an oracle reads it"


def test_a_step_that_is_on_local_disks_alone_is_drained_when_save_is_asked_for_it(tiered: Tiered) -> None:
    with tiered.open(drain=ckptlib.Steps(1000), local_keep=1) as ckpt:
        tiered.job.body()
        ckpt.after_step(1)
        assert ckpt.pending is not None
        assert not ckpt.pending.drains
        assert ckpt.pending.done(), "it is told at once that there is nothing to wait for"
        told = []
        ckpt.pending.add_done_callback(lambda pending: told.append(pending.step))
        asked = ckpt.save(1)
        assert asked is ckpt.pending
        assert asked.drains
        asked.wait_committed(WAIT_S)
        assert told == [1]
        assert ckpt.save(1) is asked, "and it is drained once"
        assert steps(tiered.bucket) == [1]
        tiered.same_bytes(1)
        assert not tiered.saved(ckpt, 2).drains
        tiered.away(True, "packs")
        waits = ckpt.save(2)
        assert not waits.committed
        tiered.saved(ckpt, 3)
        tiered.away(False)
        waits.wait_committed(WAIT_S)
    assert [found.number for found in read_root(tiered.bucket)] == [1, 2]


def test_a_step_that_failed_on_the_local_disk_is_no_success_of_save(tiered: Tiered) -> None:
    tiered.disk.mkdir()
    (tiered.disk / "packs").write_text("in the way")
    with tiered.open(drain=ckptlib.Steps(1000)) as ckpt:
        tiered.job.body()
        ckpt.after_step(1)
        with pytest.raises(SaveFailed, match=r"save 0*1-.* failed and will never be committed"):
            ckpt.save(1)
        (tiered.disk / "packs").unlink()
        ckpt.save(2).wait_committed(WAIT_S)
    assert steps(tiered.bucket) == [2]


def test_a_drain_that_falls_due_between_saves_is_made_by_the_next_one(tiered: Tiered) -> None:
    with tiered.open(every=ckptlib.Steps(2), drain=ckptlib.Steps(3)) as ckpt:
        drained = {}
        for step in range(1, 13):
            tiered.job.body()
            ckpt.after_step(step)
            if ckpt.pending is not None and ckpt.pending.step == step:
                drained[step] = ckpt.pending.drains
                ckpt.pending.wait_local(WAIT_S)
                if ckpt.pending.drains:
                    ckpt.pending.wait_committed(WAIT_S)
    assert drained == {2: False, 4: True, 6: True, 8: False, 10: True, 12: True}


# -- the bucket is away


def test_saves_go_on_while_the_bucket_is_away_and_it_has_the_newest_when_it_is_back(
    tiered: Tiered, caplog: pytest.LogCaptureFixture
) -> None:
    with tiered.open(local_keep=2) as ckpt:
        tiered.saved(ckpt, 1).wait_committed(WAIT_S)
        tiered.away(True)
        drains = [tiered.saved(ckpt, step).drains for step in range(2, 12)]
        assert drains[:2] == [True, True]
        assert not any(drains[3:]), "what is said in one step is acted upon in the next"
        assert "step 5 stays on local disks: some rank has 2 steps that are not drained yet" in caplog.text
        assert steps(tiered.bucket) == [1]
        assert {2, 3, 10, 11} <= {*tiered.on_disk()}, "what is to be drained, and the newest"
        assert len(tiered.on_disk()) <= 7, "no more than that piles up"
        tiered.away(False)
        step = 12
        while True:  # whichever finds room
            pending = tiered.saved(ckpt, step)
            if pending.drains:
                break
            step += 1
            time.sleep(0.05)
        pending.wait_committed(WAIT_S)
    assert {1, 2, 3, step} <= {*steps(tiered.bucket)}
    assert [found.number for found in read_root(tiered.bucket)] == steps(tiered.bucket)


def test_a_bucket_that_is_away_before_the_first_save_delays_what_is_drained_only(tiered: Tiered) -> None:
    """Not even the record of the generation is there, and what is saved goes to the disk all the same."""
    with tiered.open(drain=ckptlib.Steps(3), local_keep=10) as ckpt:
        tiered.away(True, "generations|packs|parts|steps")
        for step in range(1, 7):
            tiered.saved(ckpt, step)
        assert not list(tiered.bucket.glob("generations/*"))
        assert tiered.on_disk() == [1, 2, 3, 4, 5, 6]
        tiered.away(False)
        ckpt.save(7).wait_committed(WAIT_S)
    assert steps(tiered.bucket) == [3, 6, 7]


def test_a_bucket_that_is_away_before_the_first_save_takes_no_more_of_the_disk_than_one_that_is_away_later(
    tiered: Tiered,
) -> None:
    """And a restart finds the newest step, though the record comes behind it."""
    with tiered.open() as ckpt:
        for step in (1, 2):
            tiered.saved(ckpt, step)
    tiered.job = Job(tiered.bucket, seed=1)
    ckpt = tiered.open()
    assert ckpt.restore().step == 2
    tiered.away(True, "generations|packs|parts|steps")
    for step in range(3, 16):
        tiered.saved(ckpt, step)
    assert len(list(tiered.bucket.glob("generations/*.json"))) == 1
    assert {1, 2, 3, 4, 14, 15} <= {*tiered.on_disk()}, "the job before, what is to be drained, and the newest"
    assert len(tiered.on_disk()) <= 9
    bits = tiered.job.bits()
    os.kill(ckpt._session.writer.pid, signal.SIGKILL)
    ckpt.__exit__(InterruptedError, InterruptedError(), None)
    tiered.away(False)
    tiered.job = Job(tiered.bucket, seed=2)
    with tiered.open() as ckpt:
        report = ckpt.restore()
        assert (report.step, report.tier) == (15, "local")
        assert tiered.job.bits() == bits


def test_a_full_bucket_fails_what_is_drained_and_ends_no_training(tiered: Tiered) -> None:
    with tiered.open(drain=ckptlib.Steps(1)) as ckpt:
        tiered.plans({"op": "commit", "key": "^packs", "action": "full"})
        for step in range(1, 5):
            pending = tiered.saved(ckpt, step)
            with pytest.raises(SaveFailed, match=r"may be committed all the same.*no space, as planned"):
                pending.wait_committed(WAIT_S)
        run = ckpt._session.outcomes.run
        assert (run.count, run.lasted_s) == (4, 0.0)
        assert {3, 4} <= {*tiered.on_disk()}
        tiered.plans()
        tiered.saved(ckpt, 5).wait_committed(WAIT_S)
    assert steps(tiered.bucket) == [5]


def test_a_step_that_a_full_bucket_refused_is_restored_from_the_disk_and_drained(tiered: Tiered) -> None:
    """So nobody is told that it never comes."""
    with suppress(InterruptedError), tiered.open(drain=ckptlib.Steps(1)) as ckpt:
        tiered.plans({"op": "commit", "key": "^packs", "action": "full"})
        pending = tiered.saved(ckpt, 1)
        with pytest.raises(SaveFailed, match="may be committed all the same"):
            pending.wait_committed(WAIT_S)
        raise InterruptedError
    tiered.plans()
    with tiered.open(Job(tiered.bucket, seed=1)) as ckpt:
        assert ckpt.restore().step == 1
        assert ckpt.pending is not None
        ckpt.pending.wait_committed(WAIT_S)
    assert steps(tiered.bucket) == [1]


def test_a_bucket_that_stalls_holds_no_save_up(tiered: Tiered) -> None:
    with tiered.open(drain=ckptlib.Steps(1)) as ckpt:
        tiered.saved(ckpt, 1).wait_committed(WAIT_S)
        tiered.plans({"op": "commit", "action": "hold", "once": True})
        stalled = tiered.saved(ckpt, 2)
        for step in range(3, 8):
            tiered.saved(ckpt, step)
        assert not stalled.committed, "none of these waited for it"
        tiered.plans()
        stalled.wait_committed(WAIT_S)


# -- what it comes back from


def crashed(tiered: Tiered, drain: ckptlib.Steps, last: int, **options: object) -> list[list[bytes]]:
    """A job that ends without a close after so many saves; its state after each of them."""
    bits = []
    ckpt = tiered.open(drain=drain, **options)
    try:
        for step in range(1, last + 1):
            pending = tiered.saved(ckpt, step)
            bits.append(tiered.job.bits())
            if pending.drains:
                pending.wait_committed(WAIT_S)
        raise InterruptedError
    except InterruptedError as error:
        ckpt.__exit__(type(error), error, None)
    return bits


def train(tiered: Tiered, ckpt: ckptlib.Checkpointer, metrics: Mapping[int, Mapping[str, object]]) -> None:
    """The steps that have metrics; whatever they save is where it goes."""
    for step, told in metrics.items():
        tiered.job.body()
        ckpt.after_step(step, metrics=told)
        if ckpt.pending is not None and ckpt.pending.step == step:
            wait = ckpt.pending.wait_committed if ckpt.pending.drains else ckpt.pending.wait_local
            wait(WAIT_S)


def test_restores_the_newest_from_the_disk_and_drains_it_at_once(tiered: Tiered) -> None:
    bits = crashed(tiered, ckptlib.Steps(3), 5)
    assert steps(tiered.bucket) == [3]
    job, told = Job(tiered.bucket, seed=1), list[Event]()
    with tiered.open(job, drain=ckptlib.Steps(1000), on_event=told.append) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.committed, report.in_memory, report.skipped) == (5, False, False, ())
        assert [type(event) for event in told][:2] == [Restored, Begun], "it is saved again"
        assert str(tiered.disk) in report.source
        assert job.bits() == bits[4]
        assert ckpt.pending is not None
        ckpt.pending.wait_committed(WAIT_S)
    assert steps(tiered.bucket) == [3, 5]
    found = Job(tiered.bucket, seed=2)
    assert ckptlib.load(tiered.bucket, found.state).step == 5
    assert found.bits() == bits[4]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(BEST, BEST, id="best"),
        pytest.param(ckptlib.Keep(last=1, exempt=lambda step: step == 8), ckptlib.Keep(last=1), id="exempt"),
    ],
)
def test_what_the_disk_alone_had_is_kept_as_its_job_said(
    tiered: Tiered, before: ckptlib.Keep, after: ckptlib.Keep
) -> None:
    """By the metrics that it was saved with, and as exempt, though the job that saves it again says nothing of it."""
    options: dict[str, object] = {"every": 2, "drain": ckptlib.Steps(6)}
    ckpt = tiered.open(keep=before, **options)
    train(tiered, ckpt, {step: {"val_loss": 1.0} for step in range(1, 8)})
    train(tiered, ckpt, {8: {"val_loss": 0.1, "other": (float("inf"), np.float32(2))}})
    assert (ckpt.pending.step, ckpt.pending.drains) == (8, False)
    ckpt.__exit__(InterruptedError, InterruptedError(), None)
    told = body_of(next(tiered.disk.glob("parts/000000000008-*/*")))["metrics"]
    assert told["val_loss"] == 0.1
    tiered.job = Job(tiered.bucket, seed=1)
    with tiered.open(keep=after, **options) as ckpt:
        assert (ckpt.restore().step, ckpt.pending.step) == (8, 8)
        ckpt.pending.wait_committed(WAIT_S)
        train(tiered, ckpt, {step: {"val_loss": 2.0} for step in range(9, 13)})
    sweep(catalog(tiered.bucket), after, None)
    assert steps(tiered.bucket) == [8, 12]
    (manifest,) = tiered.bucket.glob("steps/000000000008-*.json")
    assert body_of(manifest)["metrics"] == told


def test_what_both_have_is_read_from_the_disk_and_from_the_bucket_where_that_is_damaged(tiered: Tiered) -> None:
    bits = crashed(tiered, ckptlib.Steps(1), 2)
    with tiered.open(Job(tiered.bucket)) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.committed) == (2, True)
        assert str(tiered.disk) in report.source
        assert ckpt.pending is None, "there is nothing to be drained"
    pack = max(tiered.disk.glob("packs/*2-*/*"), key=lambda path: path.stat().st_size)
    flip_bit(pack, pack.stat().st_size // 2)
    job = Job(tiered.bucket, seed=1)
    with tiered.open(job) as ckpt:
        report = ckpt.restore()
        assert report.step == 2
        assert str(tiered.bucket) in report.source
        assert ["local disks" in why for why in report.skipped] == [True]
        assert job.bits() == bits[1]


def test_without_the_disk_the_bucket_is_what_there_is(tiered: Tiered) -> None:
    bits = crashed(tiered, ckptlib.Steps(3), 5)
    shutil.rmtree(tiered.disk)
    job = Job(tiered.bucket, seed=1)
    with tiered.open(job) as ckpt:
        assert ckpt.restore().step == 3
        assert job.bits() == bits[2]


def test_what_history_left_behind_is_not_restored_from_the_disk(tiered: Tiered) -> None:
    crashed(tiered, ckptlib.Steps(3), 5)
    job = Job(tiered.bucket, seed=1)
    ckptlib.load(tiered.bucket, job.state, step=3)
    with tiered.open(job) as ckpt:
        ckpt.save(4).wait_committed(WAIT_S)
    with tiered.open(Job(tiered.bucket)) as ckpt:
        assert ckpt.restore().step == 4


def test_a_disk_of_another_root_is_refused(tiered: Tiered, tmp_path: Path) -> None:
    crashed(tiered, ckptlib.Steps(1), 1)
    with pytest.raises(StoreError, match=r"local=.*holds what was saved for root [0-9a-f]{32}, but this job"):
        ckptlib.Checkpointer(tmp_path / "other", tiered.job.state, every=1, local=tiered.disk)


def test_a_disk_that_cannot_be_looked_at_is_not_taken_for_an_empty_one(tiered: Tiered) -> None:
    """A step there may be newer than all that the store has, and its job's number taken."""
    crashed(tiered, ckptlib.Steps(1), 1)
    (tiered.disk / "begun").rename(tiered.disk / "elsewhere")
    (tiered.disk / "begun").symlink_to("elsewhere")
    with pytest.raises(StoreError, match=r"local=.* on .*: cannot be looked at, .*/begun is a sym.* local= another"):
        tiered.open(Job(tiered.bucket))
    with tiered.open(Job(tiered.bucket), local=tiered.disk.with_name("another")) as ckpt:
        assert ckpt.restore().step == 1


def test_the_root_itself_is_refused_as_its_disk(tiered: Tiered, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a root of its own, or the job's"):
        ckptlib.Checkpointer(tiered.url, tiered.job.state, every=1, local=tiered.bucket)
    crashed(tiered, ckptlib.Steps(1), 1)
    with pytest.raises(ValueError, match="is a root of its own, or the job's"):
        ckptlib.Checkpointer(tmp_path / "other", tiered.job.state, every=1, local=tiered.bucket)


# -- retention


def test_the_disk_keeps_what_is_asked_and_what_later_saves_need(tiered: Tiered) -> None:
    """Saves of unchanged tensors take them over from the newest drained one, whose packs stay on the disk for that."""
    with tiered.open(drain=ckptlib.Steps(4), local_keep=2) as ckpt:
        for step in range(1, 13):
            pending = tiered.saved(ckpt, step)
            if pending.drains:
                pending.wait_committed(WAIT_S)
            left = tiered.on_disk()
            assert {step - 1, step} - {0} <= {*left}
            assert len(left) <= 5
            packs = {str(path.relative_to(tiered.disk)) for path in tiered.disk.glob("packs/*/*")}
            for path in tiered.disk.glob("parts/*/*"):
                assert {key for key, *_ in json.loads(path.read_bytes())["body"]["packs"]} <= packs
    assert 4 not in tiered.on_disk()
    assert steps(tiered.bucket) == [4, 8, 12]


def test_a_layout_that_a_sweep_removed_is_there_again_with_the_next_step_that_names_it(tiered: Tiered) -> None:
    """Another rank's, of a layout that no part named then."""
    with tiered.open(drain=ckptlib.Steps(1)) as ckpt:
        tiered.saved(ckpt, 1).wait_committed(WAIT_S)
        tiered.saved(ckpt, 2).wait_committed(WAIT_S)  # of the optimizer's state, too
        layouts = {path: path.read_bytes() for path in tiered.disk.glob("layouts/*")}
        for path in layouts:
            path.unlink()
        tiered.saved(ckpt, 3).wait_committed(WAIT_S)
        (path,) = tiered.disk.glob("layouts/*")
        assert path.read_bytes() == layouts[path]


@pytest.mark.parametrize("lost", [False, True])
def test_a_layout_that_the_disk_does_not_give_is_read_from_the_bucket(
    tiered: Tiered, lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """All steps there have the one, and are newer than those of the bucket."""
    bits = crashed(tiered, ckptlib.Steps(3), 5)
    for path in tiered.disk.glob("layouts/*"):
        if lost:
            path.unlink()
        else:
            flip_bit(path, 300)
    job = Job(tiered.bucket, seed=1)
    with tiered.open(job) as ckpt:
        report = ckpt.restore()
        assert (report.step, report.tier, report.skipped) == (5, "local", ())
        assert job.bits() == bits[4]
        assert ckpt.pending is not None
        ckpt.pending.wait_committed(WAIT_S)
    assert "It is read from " in caplog.text
    assert [step.number for step in read_root(tiered.bucket)] == [3, 5]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small tmpfs")
def test_a_disk_with_room_for_four_shares_is_enough(tiered: Tiered, small_disk: Path) -> None:
    """While the bucket is away as well: what is to be drained, the newest one, and the one that is written."""
    tiered.disk = small_disk / "disk"
    with tiered.open(drain=ckptlib.Steps(1)) as ckpt:
        tiered.saved(ckpt, 1).wait_committed(WAIT_S)
        tiered.away(True)
        for step in range(2, 12):
            tiered.saved(ckpt, step)
        assert {2, 3, 11} <= {*tiered.on_disk()}, "what is to be drained, and the newest"
        tiered.away(False)
        step = 12
        while not (pending := tiered.saved(ckpt, step)).drains:
            step += 1
            time.sleep(0.05)
        pending.wait_committed(WAIT_S)
    assert {1, 2, 3, step} <= {*steps(tiered.bucket)}
    job = Job(tiered.bucket, seed=1)
    assert ckptlib.load(tiered.bucket, job.state).step == step
    assert job.bits() == tiered.job.bits()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts a small tmpfs")
@pytest.mark.parametrize("usable", [True, False])
def test_a_disk_that_the_job_before_left_full_takes_the_saves_of_the_next_one(
    tiered: Tiered, small_disk: Path, usable: bool
) -> None:
    """A restart needs no more than one step of what is there; and nothing of that where none is whole, be it that the
    bucket has none either."""
    tiered.disk = small_disk / "disk"
    ckpt = tiered.open(drain=ckptlib.Steps(1))
    if usable:
        tiered.saved(ckpt, 1).wait_committed(WAIT_S)
    tiered.away(True)
    for step in range(2, 8):
        tiered.saved(ckpt, step)
    bits = tiered.job.bits()
    os.kill(ckpt._session.writer.pid, signal.SIGKILL)
    ckpt.__exit__(InterruptedError, InterruptedError(), None)
    left = {path.name for path in tiered.disk.glob("parts/*")}
    assert len(left) > 3
    if not usable:
        for path in tiered.disk.glob("parts/*/*"):
            path.unlink()
    tiered.job = Job(tiered.bucket, seed=1)
    ckpt = tiered.open(drain=ckptlib.Steps(1))
    report = ckpt.restore()
    assert (report.step, report.tier) == ((7, "local") if usable else (0, "store"))
    if usable:
        assert ckpt.pending is not None
        ckpt.pending.wait_local(WAIT_S)
        assert tiered.job.bits() == bits
        there = {path.name for path in tiered.disk.glob("parts/*")}
        assert max(left) in there, "it has not been told yet that its own is on all disks"
    for step in range(report.step + 1, report.step + 4):
        tiered.saved(ckpt, step)
    os.kill(ckpt._session.writer.pid, signal.SIGKILL)
    ckpt.__exit__(InterruptedError, InterruptedError(), None)
    tiered.away(False)
    with tiered.open(Job(tiered.bucket, seed=2)) as ckpt:
        assert ckpt.restore().step == report.step + 3


def test_the_disk_of_the_job_before_is_freed_when_the_next_one_has_a_step_of_its_own(tiered: Tiered) -> None:
    crashed(tiered, ckptlib.Steps(100), 3, local_keep=3)
    assert tiered.on_disk() == [1, 2, 3]
    tiered.job = Job(tiered.bucket, seed=1)
    with tiered.open(drain=ckptlib.Steps(100)) as ckpt:
        assert ckpt.restore().step == 3
        assert ckpt.pending is not None
        ckpt.pending.wait_committed(WAIT_S)
        assert tiered.on_disk() == [1, 2, 3, 3], "it has none of its own that it was told of"
        for step in range(4, 9):
            tiered.saved(ckpt, step)
    generations = {path.name.split("-")[1] for path in tiered.disk.glob("p*s/*")}
    assert generations == {"000002"}


def test_options_of_a_local_tier_are_checked(tmp_path: Path) -> None:
    state = Job(tmp_path / "root").state
    for options, text in (
        ({"drain": ckptlib.Steps(2)}, "give local=PATH"),
        ({"drain_bandwidth": 1e6}, "give local=PATH"),
        ({"local": tmp_path / "d", "local_keep": 0}, "local_keep=0"),
        ({"local": tmp_path / "d", "drain_bandwidth": 0}, "drain_bandwidth=0"),
    ):
        with pytest.raises(ValueError, match=text):
            ckptlib.Checkpointer(tmp_path / "root", state, every=1, **options)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="drain=5: expected a policy"):
        ckptlib.Checkpointer(tmp_path / "root", state, every=1, local=tmp_path / "d", drain=5)  # type: ignore[arg-type]


def test_the_log_says_nothing_of_a_job_that_goes_well(tiered: Tiered, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), tiered.open() as ckpt:
        tiered.saved(ckpt, 1).wait_committed(WAIT_S)
    assert caplog.text == ""
