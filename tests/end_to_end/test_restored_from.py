"""From where each start restored, as the root records it: the store, local disks, memory. And from which step."""

from __future__ import annotations

import os
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.increments import body_of
from helpers.inside import num_saves, settle
from helpers.one_job import WAIT_S, Job, catalog, step_once, steps
from helpers.writers import until

import ckptlib
from ckptlib.catalog.accounts import read_accounts
from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import sweep
from ckptlib.errors import CheckpointNotFound, NoRoom, SaveFailed
from ckptlib.events import Begun, Event
from ckptlib.recovery import candidates
from ckptlib.recovery.filling import Filling
from ckptlib.slots.slot import Slot
from ckptlib.stores.local import LocalStore


@pytest.mark.parametrize("tier", ["store", "local", "memory"])
def test_the_tier_is_in_the_account_and_in_manifests(tmp_path: Path, tier: str) -> None:
    more: dict[str, Any] = {"local": tmp_path / "disk"} if tier == "local" else {}
    more |= {"peers": ckptlib.Peers(every=1, copies=0)} if tier == "memory" else {}
    (tmp_path / "arena").mkdir()
    state = {"w": torch.zeros(4)}
    told = []

    def start(last: int, fails: bool) -> None:
        with ckptlib.Checkpointer(tmp_path / "root", state, every=2, arena=tmp_path / "arena", **more) as ckpt:
            report = ckpt.restore()
            told.append(report.tier if report.step else None)
            kept_again = report.step > 0 and tier != "store"  # without peers, what the store has is not
            assert num_saves(ckpt) == 0 or kept_again
            for step in ckpt.loop(report.step, last):
                state["w"] += 1
                if fails and step == last - 1:
                    raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        start(4, fails=True)
    start(8, fails=False)
    assert told == [None, tier]
    catalog = Catalog(LocalStore(str(tmp_path / "root")))
    accounts = read_accounts(catalog).told
    assert [accounts[of].restored_from for of in sorted(accounts)] == told
    newest = sorted((tmp_path / "root" / "steps").glob("*.json"))[-1]
    assert body_of(newest)["account"]["restored_from"] == tier


@pytest.mark.parametrize("last", [5, 6], ids=["of the step that is told", "of one that is not"])
def test_the_account_of_a_start_that_ends_with_a_save(tmp_path: Path, last: int) -> None:
    """As an early stop does: `save(step + 1)`, then `break`."""
    state = {"w": torch.zeros(4)}
    with ckptlib.Checkpointer(tmp_path / "root", state, every=10**6, arena=tmp_path) as ckpt:
        ckpt.restore()
        for step in range(1, 6):
            ckpt.after_step(step)
        ckpt.save(last)
    accounts = read_accounts(catalog(tmp_path / "root"))
    assert accounts.problems == []
    [account] = accounts.told.values()
    assert (account.end, account.num_saves, account.marks[-1].step) == ("closed", 1, last)


@pytest.mark.parametrize("only", [None, "model"], ids=["restores nothing", "restores a part"])
def test_a_job_that_takes_no_snapshot_leaves_those_of_the_job_before(tmp_path: Path, only: str | None) -> None:
    """Nothing is in the store: its close, however clean, must not lose the only step that there is."""
    (tmp_path / "arena").mkdir()
    state = {"model": torch.zeros(4), "rest": torch.zeros(4)}

    def checkpointer() -> ckptlib.Checkpointer:
        peers = ckptlib.Peers(every=1, copies=0)
        return ckptlib.Checkpointer(tmp_path / "root", state, every=10**6, peers=peers, arena=tmp_path / "arena")

    with suppress(KeyboardInterrupt), checkpointer() as ckpt:
        for _ in ckpt.loop(0, 10**6):
            for tensor in state.values():
                tensor += 1
            time.sleep(0.01)
            if ckpt.coverage is not None and ckpt.coverage.step is not None:
                raise KeyboardInterrupt
    with checkpointer() as ckpt:
        if only is not None:
            assert ckpt.restore(only=only).tier == "memory"
    assert steps(tmp_path / "root") == []
    with checkpointer() as ckpt:
        report = ckpt.restore()
        assert (report.step > 0, report.tier) == (True, "memory")
        assert [tensor.tolist() for tensor in state.values()] == [[report.step] * 4] * 2
    assert steps(tmp_path / "root") == [report.step]
    assert not list((tmp_path / "arena").glob("*.slot")), "now the store has it"


def test_what_memory_alone_had_is_kept_as_its_job_said(tmp_path: Path) -> None:
    """By the metrics that it was saved with, as exempt, and as old as it is, though the job that saves it again says
    nothing of it."""
    (tmp_path / "arena").mkdir()
    state = {"model": torch.zeros(4)}

    def checkpointer(keep: ckptlib.Keep) -> ckptlib.Checkpointer:
        peers = ckptlib.Peers(every=1, copies=0)
        options: dict[str, Any] = {"every": 10**6, "peers": peers, "keep": keep, "arena": tmp_path / "arena"}
        return ckptlib.Checkpointer(tmp_path / "root", state, **options)

    with suppress(KeyboardInterrupt), checkpointer(ckptlib.Keep(exempt=lambda step: True)) as ckpt:
        for step in ckpt.loop(0, 10**6):
            ckpt.log({"val_loss": float(step + 1)})
            time.sleep(0.01)
            if ckpt.coverage is not None and ckpt.coverage.step is not None:
                raise KeyboardInterrupt
    again = time.time()
    with checkpointer(ckptlib.Keep()) as ckpt:
        report = ckpt.restore()
        assert report.tier == "memory"
    (manifest,) = (tmp_path / "root" / "steps").glob("*.json")
    assert body_of(manifest)["created"] < again
    assert body_of(manifest)["metrics"] == {"val_loss": float(report.step)}
    assert body_of(manifest)["exempt"] is True


def test_a_restore_behind_one_that_saves_again_is_refused(tmp_path: Path) -> None:
    """The state is left alone, and the job goes on."""
    job = Job(tmp_path / "root")
    local: dict[str, Any] = {"local": tmp_path / "disk", "drain": ckptlib.Steps(10**6)}
    with suppress(KeyboardInterrupt), job.checkpointer(every=1, **local) as ckpt:
        job.body()
        ckpt.after_step(1)
        assert ckpt.pending is not None
        ckpt.pending.wait_local(WAIT_S)
        raise KeyboardInterrupt
    told: list[Event] = []
    with job.checkpointer(every=10**6, on_event=told.append, **local) as ckpt:
        assert ckpt.restore().tier == "local"
        assert [(event.step, event.tier) for event in told if isinstance(event, Begun)] == [(1, "store")]
        before = job.bits()
        with pytest.raises(ValueError, match=r"call restore once: it has saved step 1 again.*create another one"):
            ckpt.restore()
        assert job.bits() == before
        ckpt.after_step(2)
    assert steps(job.root) == [1]


@pytest.mark.parametrize("later", [False, True])
def test_a_restored_step_that_cannot_be_saved_again_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, later: bool
) -> None:
    """Memory alone has the last step, and there is no room for another snapshot; unless a later save finds some."""
    (tmp_path / "arena").mkdir()
    state = {"model": torch.zeros(4)}

    def checkpointer() -> ckptlib.Checkpointer:
        peers = ckptlib.Peers(every=1, copies=0)
        return ckptlib.Checkpointer(tmp_path / "root", state, every=10**6, peers=peers, arena=tmp_path / "arena")

    def create(*given: object, **more: object) -> Slot:
        raise NoRoom("as planned")

    with suppress(KeyboardInterrupt), checkpointer() as ckpt:
        for _ in ckpt.loop(0, 10**6):
            state["model"] += 1
            time.sleep(0.01)
            if ckpt.coverage is not None and ckpt.coverage.step is not None:
                raise KeyboardInterrupt
    expects = nullcontext() if later else pytest.raises(SaveFailed, match="nor is a later one: as planned")
    with monkeypatch.context() as full, expects, checkpointer() as ckpt:
        full.setattr(Slot, "create", create)
        last = ckpt.restore().step
        assert last > 0
        if later:
            full.undo()
            ckpt.save(last + 1)
    assert f"restored step {last}, but it is not saved again, and the store does not have it: as planned" in caplog.text
    assert steps(tmp_path / "root") == [last + 1] * later
    with checkpointer() as ckpt:
        report = ckpt.restore()
        assert (report.step, report.tier) == (last + later, "store" if later else "memory")
        assert state["model"].tolist() == [last] * 4


def test_starts_that_die_before_their_first_step_drop_no_earlier_one(tmp_path: Path) -> None:
    """What memory alone had is saved again by them, time and again: that is one step."""
    (tmp_path / "arena").mkdir()
    state = {"model": torch.zeros(4)}

    def checkpointer() -> ckptlib.Checkpointer:
        peers, keep = ckptlib.Peers(every=1, copies=0), ckptlib.Keep(last=3)
        return ckptlib.Checkpointer(
            tmp_path / "root", state, every=10**6, peers=peers, keep=keep, arena=tmp_path / "arena"
        )

    with suppress(KeyboardInterrupt), checkpointer() as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step).wait_committed(WAIT_S)
        step = 3
        while ckpt.coverage is None or (ckpt.coverage.step or 0) <= 3:
            step += 1
            ckpt.after_step(step)
            time.sleep(0.01)
        raise KeyboardInterrupt
    newest = None
    for _ in range(6):
        with suppress(KeyboardInterrupt), checkpointer() as ckpt:
            report = ckpt.restore()
            newest = newest or report.step
            assert (report.step, report.tier) == (newest, "memory")
            if ckpt.pending is not None:
                ckpt.pending.wait_committed(WAIT_S)
            settle(ckpt, WAIT_S)
            raise KeyboardInterrupt

    def is_tidy() -> bool:
        for record in (tmp_path / "root" / "trash").iterdir():
            if (tmp_path / "root" / "steps" / record.name).exists():  # a start came as a sweep was about to drop it,
                os.utime(record, (0, 0))  # which then leaves it until the record is older than any save may take
        sweep(catalog(tmp_path / "root"), ckptlib.Keep(last=3), None)  # the writer's may not have been yet, or be at it
        return steps(tmp_path / "root") == [2, 3, newest]

    until(is_tidy)


@pytest.mark.parametrize("fast", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_that_is_dropped_as_it_is_read_is_no_reason_for_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fast: bool
) -> None:
    """A job that still runs saves, and drops what it does not keep, between the listing and the read of another one.
    Where it does so each time, the other one says so."""
    job = Job(tmp_path / "root")
    read, saved = Filling._from_store, [*range(1, 4)]
    with suppress(KeyboardInterrupt), job.checkpointer(every=1) as live:
        for step in saved:
            job.body()
            step_once(live, step)

        def read_late(*given: Any) -> Any:
            if fast or len(saved) == 3:
                saved.append(saved[-1] + 1)
                live.save(saved[-1]).wait_committed(WAIT_S)
                sweep(catalog(job.root), ckptlib.Keep(last=1, every=None if fast else 2), None)
            return read(*given)

        monkeypatch.setattr(Filling, "_from_store", read_late)
        monkeypatch.setattr(candidates, "MAX_LISTINGS", 1)
        with Job(job.root, seed=9).checkpointer() as ckpt:
            if fast:
                with pytest.raises(CheckpointNotFound, match=r"each step is dropped before it is read.*Stop it"):
                    ckpt.restore()
            else:
                assert ckpt.restore().step == 4
                assert steps(job.root) == [2, 4]
        raise KeyboardInterrupt
