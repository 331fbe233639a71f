"""`ckptlib gc` below a live job, on a store whose clocks differ by more than the grace period: what a save has just put
looks old, and so do the trash records of such saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import pytest
from helpers.actors import ActorStore, no_chance
from helpers.small_job import GRACE, GRACE_S, HOUR_S, Save, SmallJob
from support import age

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.retention import sweep
from ckptlib.errors import ObjectNotFound, SaveFailed
from ckptlib.policy.keep import Keep

KEEP = Keep(last=2, grace=GRACE)


@pytest.fixture
def job() -> Iterator[SmallJob]:
    """Step 1."""
    with no_chance():
        job = SmallJob()
        job.change(range(16))
        job.save_and_commit()
        yield job


def gc(job: SmallJob, before: Callable[[str, str], None] = lambda op, key: None) -> None:
    """By a machine, or an end of the store, whose clock is that far ahead of the one by which all else was put."""
    age(job.store, GRACE_S + HOUR_S)
    store = ActorStore(job.store)
    store.before = before
    sweep(Catalog(store), KEEP, None)


def commit(job: SmallJob, save: Save) -> bool:
    """Whether it was; else something of it was gone, which is told."""
    try:
        job.writers[0].committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    except (ObjectNotFound, SaveFailed):
        return False
    finally:
        job._committed(save.id)
    return True


class Nth:
    """Called before each operation of a process; calls something before the nth."""

    def __init__(self, number: int, happens: Callable[[], object]) -> None:
        self.left, self.happens = number, happens

    def __call__(self, op: str, key: str) -> None:
        self.left -= 1
        if self.left < 0 and not self.done:
            self.done = True
            self.happens()

    done = False


@pytest.mark.parametrize("sweeps", [1, 2, 3])
def test_sweeps_before_each_request_of_a_commit(job: SmallJob, sweeps: int) -> None:
    """A step that is listed afterwards loads; one that is not was told to have failed."""
    told: list[bool] = []
    for number in count():
        job.change([number % 16])
        save = job.save()
        before = Nth(number, lambda: [gc(job) for _ in range(sweeps)])
        job.writers[0].store.before = before
        told.append(commit(job, save))
        job.writers[0].store.before = lambda op, key: None
        assert told[-1] == (save.id in job.listed)
        job.note_dropped({})
        job.listed &= job.found_listed()
        job.check()
        job.dropped.clear()
        if not before.done:
            break
    assert {*told} == {True, False}


def test_a_commit_before_each_request_of_the_sweep_that_deletes(job: SmallJob) -> None:
    told: list[bool] = []
    for number in count():
        job.change([number % 16])
        save = job.save()
        gc(job)
        assert f"trash/{save.id}.json" in job.keys("trash/")
        before = Nth(number, partial(lambda save: told.append(commit(job, save)), save))
        gc(job, before)
        job.listed &= job.found_listed()
        job.check()
        job.dropped.clear()
        if not before.done:
            break
    assert {*told} == {False}, "its record is there from the start"


def test_the_job_goes_on(job: SmallJob) -> None:
    job.change([1])
    save = job.save()
    job.writers[0].store.before = lambda op, key: gc(job) if op == "put" and key == save.id.manifest_key else None
    with pytest.raises(SaveFailed, match=r"step 2: has a trash record, .* clocks .* The step is taken back"):
        job.writers[0].committer.commit_when_whole(save.id, save.world_size, lambda: 0.0)
    job.writers[0].store.before = lambda op, key: None
    job.change([2])
    assert commit(job, job.save())
    job.check()
    job.settle(KEEP)
    assert {step.step for step in job.listed} == {1, 3}
