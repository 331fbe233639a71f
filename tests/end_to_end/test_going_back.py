"""`restore(step=)`: exactly that step or none; and what any later restart finds."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest
import torch
from helpers.one_job import WAIT_S, Job, catalog, damage, step_once, steps
from helpers.servers import ObjectStorage

import ckptlib
from ckptlib.catalog.retention import sweep
from ckptlib.checkpoint import load_step
from ckptlib.cli import app as cli
from ckptlib.errors import CheckpointNotFound, CorruptData, SaveFailed, StateError
from ckptlib.policy.keep import Keep
from ckptlib.recovery import filling
from ckptlib.recovery.local_step import LOOKED_AT

TOTAL = 8


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Has saved steps 1 to 8."""
    job = Job(tmp_path / "root")
    with job.checkpointer(every=1) as ckpt:
        for step in range(1, TOTAL + 1):
            job.body()
            step_once(ckpt, step)
    return job


def again(job: Job) -> Job:
    return Job(job.root, seed=99)


def test_what_follows_is_what_followed_the_first_time(job: Job) -> None:
    later = again(job)
    with later.checkpointer(every=1) as ckpt:
        report = ckpt.restore(step=5)
        assert (report.step, report.committed) == (5, True)
        assert steps(job.root) == [1, 2, 3, 4, 5], "later steps are abandoned at once"
        for _ in ckpt.loop(5, TOTAL):
            later.body()
    assert later.losses == job.losses[5:]
    assert later.bits() == job.bits()
    assert steps(job.root)[:5] == [1, 2, 3, 4, 5]
    assert steps(job.root)[-1] == TOTAL
    last = catalog(job.root).resolve("latest")
    record = catalog(job.root).generations.record(last.generation)
    assert (record.rewind, record.resumed_from and record.resumed_from.step) == (True, 5)
    with again(job).checkpointer() as ckpt:
        assert ckpt.restore().save == last


def test_a_job_that_died_before_it_saved_is_not_undone(job: Job) -> None:
    for _ in range(2):
        with suppress(KeyboardInterrupt), again(job).checkpointer() as ckpt:
            assert ckpt.restore(step=5).step == 5
            raise KeyboardInterrupt
    for _ in range(2):
        with suppress(KeyboardInterrupt), again(job).checkpointer() as ckpt:
            assert ckpt.restore().step == 5
            raise KeyboardInterrupt
    assert steps(job.root) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("step", [9, 0, "000000000005-000077-0badcafe"])
def test_a_step_that_is_not_there_abandons_nothing(job: Job, step: int | str) -> None:
    before = catalog(job.root).generations.ids()
    with again(job).checkpointer() as ckpt:
        with pytest.raises(CheckpointNotFound, match=r"holds no (step|save)"):
            ckpt.restore(step=step)
        assert ckpt.restore().step == TOTAL, "it may be asked again"
    assert catalog(job.root).generations.ids() == before
    assert steps(job.root) == [*range(1, TOTAL + 1)]


@pytest.mark.parametrize("step", [-1, 10**12])
def test_what_is_no_step_is_refused(job: Job, step: int) -> None:
    with again(job).checkpointer() as ckpt, pytest.raises(ValueError, match="a step is between 0 and"):
        ckpt.restore(step=step)


def test_a_damaged_step_abandons_nothing(job: Job) -> None:
    damage(job.root, "packs/000000000005")
    before = catalog(job.root).generations.ids()
    with again(job).checkpointer() as ckpt:
        with pytest.raises(CorruptData, match="step 5 is damaged, so the job does not go back to it, and no step is"):
            ckpt.restore(step=5)
        assert ckpt.restore(step=4).step == 4
    assert steps(job.root) == [1, 2, 3, 4]
    assert len(catalog(job.root).generations.ids()) == len(before) + 1


def test_an_abandoned_step_comes_back_by_its_full_name(job: Job) -> None:
    newest = str(catalog(job.root).resolve("latest"))
    with again(job).checkpointer() as ckpt:
        ckpt.restore(step=2)
    assert steps(job.root) == [1, 2]
    with again(job).checkpointer() as ckpt:
        assert ckpt.restore(step=newest).step == TOTAL
    assert steps(job.root) == [*range(1, TOTAL + 1)]


def test_a_step_that_retention_drops_while_it_is_loaded_is_not_gone_back_to(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `gc`, or by the writer that the job before has left."""

    def load(*given: object) -> object:
        found = load_step(*given)  # type: ignore[arg-type]
        sweep(catalog(job.root), Keep(last=1), None)
        return found

    monkeypatch.setattr(filling, "load_step", load)
    with again(job).checkpointer() as ckpt:
        with pytest.raises(CheckpointNotFound, match="retention has dropped it meanwhile"):
            ckpt.restore(step=5)
        assert ckpt.restore().step == TOTAL


def test_the_place_in_history_is_fixed_once(job: Job) -> None:
    later = again(job)
    with later.checkpointer() as ckpt:
        ckpt.restore(step=5)
        with pytest.raises(ValueError, match="its place in history is fixed"):
            ckpt.restore(step=3)
        with pytest.raises(StateError, match="saved or gone back since"):
            ckptlib.load(job.root, later.state, step=3)
        ckptlib.load(job.root, Job(job.root.parent / "other").state, step=3)
        assert ckpt.restore().step == 5
    assert steps(job.root) == [1, 2, 3, 4, 5]


def test_a_job_that_counts_anew_from_a_loaded_step_goes_on_from_what_is_before_its_first(job: Job) -> None:
    """Steps from its first one on are listed no more: they would stand among its own."""
    later = again(job)
    ckptlib.load(job.root, later.state, step=5)
    with later.checkpointer() as ckpt:
        ckpt.save(3)
    assert steps(job.root) == [1, 2, 3]
    record = catalog(job.root).generations.record(catalog(job.root).resolve("latest").generation)
    assert record.resumed_from is not None
    assert record.resumed_from.step == 2


def test_the_job_before_may_save_no_more(job: Job) -> None:
    old, new = again(job), again(job)
    with suppress(KeyboardInterrupt), old.checkpointer() as first:
        first.restore()
        first.save(TOTAL + 1).wait_committed(WAIT_S)
        with new.checkpointer() as ckpt:
            ckpt.restore(step=5)
        pending = first.save(TOTAL + 2)
        with pytest.raises(SaveFailed, match=r"generation .* may no longer save"):
            pending.wait_committed(WAIT_S)
        raise KeyboardInterrupt
    assert steps(job.root) == [1, 2, 3, 4, 5]


def test_a_job_that_was_just_starting_does_not_hide_a_rewind(job: Job) -> None:
    """It has restored the newest step, but is not recorded yet; nor may it go on from there."""
    with suppress(KeyboardInterrupt), again(job).checkpointer() as starting:
        assert starting.restore().step == TOTAL
        with pytest.raises(SystemExit, match="0"):
            cli.run(["rewind", str(job.root), "5", "--yes"])
        pending = starting.save(TOTAL + 1)
        with pytest.raises(SaveFailed, match=r"generation .* may no longer save"):
            pending.wait_committed(WAIT_S)
        raise KeyboardInterrupt
    assert steps(job.root) == [1, 2, 3, 4, 5]
    with again(job).checkpointer() as ckpt:
        assert ckpt.restore().step == 5


def test_retention_keeps_the_step_it_went_back_to_and_leaves_the_abandoned_alone(job: Job) -> None:
    later = again(job)
    with later.checkpointer(every=1, keep=ckptlib.Keep(last=2)) as ckpt:
        ckpt.restore(step=5)
        later.body()
        step_once(ckpt, 6)
    assert steps(job.root) == [5, 6]
    there = [(save.step, save.generation.number) for save in catalog(job.root).saves()]
    assert there == [(5, 1), (6, 1), (6, 2), (7, 1), (8, 1)]


def test_local_disks_do_not_bring_back_what_was_abandoned(tmp_path: Path) -> None:
    job = Job(tmp_path / "root")
    options = {"every": 1, "local": tmp_path / "disk", "drain": ckptlib.Steps(2), "local_keep": 9}
    with suppress(KeyboardInterrupt), job.checkpointer(**options) as ckpt:
        for step in range(1, 8):
            job.body()
            ckpt.after_step(step)
            assert ckpt.pending is not None
            ckpt.pending.wait_local(WAIT_S)
            if step % 2 == 0:
                ckpt.pending.wait_committed(WAIT_S)
        raise KeyboardInterrupt
    with suppress(KeyboardInterrupt), again(job).checkpointer(**options) as ckpt:
        assert ckpt.restore().step == 7, "which only the disk has"
        raise KeyboardInterrupt
    with suppress(KeyboardInterrupt), again(job).checkpointer(**options) as ckpt:
        assert ckpt.restore(step=4).step == 4
        raise KeyboardInterrupt
    later = again(job)
    with suppress(KeyboardInterrupt), later.checkpointer(**options) as ckpt:
        assert ckpt.restore().step == 4
        later.body()
        ckpt.after_step(5)
        assert ckpt.pending is not None
        ckpt.pending.wait_local(WAIT_S)
        raise KeyboardInterrupt
    with again(job).checkpointer(**options) as ckpt:
        assert ckpt.restore().step == 5
    assert later.losses == job.losses[4:5]


def test_a_long_history_on_local_disks_that_is_left_behind(tmp_path: Path) -> None:
    """More steps than are looked at, and all later than what the job goes on from, which only the disk has."""
    job = Job(tmp_path / "root")
    last = LOOKED_AT + 4
    options = {"every": 1, "local": tmp_path / "disk", "drain": ckptlib.Steps(last), "local_keep": 2 * last}
    with suppress(KeyboardInterrupt), job.checkpointer(**options) as ckpt:
        for step in range(1, last + 1):
            job.body()
            ckpt.after_step(step)
            assert ckpt.pending is not None
            ckpt.pending.wait_local(WAIT_S)
        ckpt.pending.wait_committed(WAIT_S)
        raise KeyboardInterrupt
    assert steps(job.root) == [last]
    with suppress(KeyboardInterrupt), again(job).checkpointer(**options) as ckpt:
        assert ckpt.restore(step=2).step == 2
        raise KeyboardInterrupt
    later = again(job)
    with suppress(KeyboardInterrupt), later.checkpointer(**options) as ckpt:
        assert ckpt.restore().step == 2
        later.body()
        ckpt.after_step(3)
        assert ckpt.pending is not None
        ckpt.pending.wait_local(WAIT_S)
        raise KeyboardInterrupt
    with again(job).checkpointer(**options) as ckpt:
        assert ckpt.restore().step == 3


def test_a_step_that_only_local_disks_have(tmp_path: Path) -> None:
    job = Job(tmp_path / "root")
    options = {"every": 1, "local": tmp_path / "disk", "drain": ckptlib.Steps(4), "local_keep": 9}
    with suppress(KeyboardInterrupt), job.checkpointer(**options) as ckpt:
        for step in range(1, 8):
            job.body()
            ckpt.after_step(step)
            assert ckpt.pending is not None
            ckpt.pending.wait_local(WAIT_S)
        raise KeyboardInterrupt
    with again(job).checkpointer(**options) as ckpt:
        report = ckpt.restore(step=6)
        assert (report.step, report.committed) == (6, False)
    assert steps(job.root)[-1] == 6, "saved again, to the store"
    with again(job).checkpointer(**options) as ckpt:
        assert ckpt.restore().step == 6


@pytest.mark.slow
def test_there_and_back_in_a_bucket(tmp_path: Path, s3: ObjectStorage) -> None:
    """By `restore(step=)`, by `ckptlib rewind`, and undone by a rewind to what was abandoned."""
    url, options = s3.url(), s3.options()
    job = Job(tmp_path / "job")

    def train(job: Job, start: int | None, total: int) -> list[int]:
        given = {"every": 1, "arena": tmp_path, "storage_options": options}
        with ckptlib.Checkpointer(url, job.state, **given) as ckpt:
            first = ckpt.restore(step="latest" if start is None else start).step if start != 0 else 0
            for step in range(first + 1, total + 1):
                job.body()
                step_once(ckpt, step)
        return [info.step for info in ckptlib.checkpoints(url, storage_options=options)]

    def rewind(step: object) -> str:
        words = [f"{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in options.items()]
        said = io.StringIO()
        with redirect_stdout(said), pytest.raises(SystemExit) as ended:
            cli.run(["rewind", url, str(step), "--yes", *(text for word in words for text in ("--option", word))])
        assert ended.value.code == 0
        return said.getvalue()

    assert train(job, 0, 6) == [1, 2, 3, 4, 5, 6]
    later = again(job)
    assert train(later, 3, 4) == [1, 2, 3, 4], "5 and 6 are abandoned"
    undo = re.search(r"ckptlib rewind \S+ (\S+)", rewind(2))
    assert undo is not None
    assert [info.step for info in ckptlib.checkpoints(url, storage_options=options)] == [1, 2]
    rewind(undo[1])
    last = again(job)
    assert train(last, None, 6) == [1, 2, 3, 4, 5, 6]
    assert last.bits() == job.bits()


def test_the_first_save_goes_on_from_what_was_loaded_last(tmp_path: Path) -> None:
    """Not from what `restore` had read before: its chunks are of a step that is left behind."""
    w = torch.zeros(5000)
    for step in (1, 2):
        ckptlib.save(tmp_path / "root", {"w": w.fill_(step)}, step)
    with ckptlib.Checkpointer(tmp_path / "root", {"w": w}, every=10**9, arena=tmp_path) as ckpt:
        assert ckpt.restore().step == 2
        ckptlib.load(tmp_path / "root", {"w": w}, step=1)
        ckpt.save(3).wait_committed(WAIT_S)
    found = catalog(tmp_path / "root")
    assert steps(tmp_path / "root") == [1, 3]
    assert {of.save.step for of in found.manifest(found.resolve("latest")).uses} == {1}


def test_saves_before_and_behind_a_checkpointer_of_one_process(tmp_path: Path) -> None:
    """As in a notebook, where all cells save to one root."""
    job = Job(tmp_path / "root")
    ckptlib.save(job.root, job.state, step=1)
    job.body()
    with job.checkpointer(every=10**9) as ckpt:
        ckpt.save(3)
    with pytest.raises(ValueError, match="steps must increase"):
        ckptlib.save(job.root, job.state, step=2)
    job.body()
    ckptlib.save(job.root, job.state, step=4)
    assert steps(job.root) == [1, 3, 4]
    told = job.bits()
    job.body()
    ckptlib.load(job.root, job.state)
    assert job.bits() == told
