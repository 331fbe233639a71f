"""Two processes on one root at once: all of one between any two operations of the other.

A step that refers to packs of earlier ones is committed while these are dropped, by the job and by a `ckptlib gc` that
know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from helpers.actors import ActorStore, Crash, no_chance
from helpers.small_job import DEADLINE_S, GRACE, GRACE_S, HOUR_S, Save, SmallJob, copied

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.finishing import finish_saves
from ckptlib.catalog.retention import sweep
from ckptlib.catalog.uses import record_of
from ckptlib.errors import CkptError
from ckptlib.format.keys import GenerationId
from ckptlib.policy.keep import Keep
from ckptlib.stores import Store

KEEP = Keep(last=1, grace=GRACE)

Actor = Callable[[Store], object]


@pytest.fixture(autouse=True)
def by_count() -> Iterator[None]:
    with no_chance():
        yield


def busy_job(stale_s: float | None = None) -> tuple[SmallJob, Save]:
    """Steps 1 to 3 were dropped long ago, and the packs of some are used by step 4, which is to be dropped.

    Step 5 uses none of them. Step 6 is not committed yet, and uses what step 4 does, and packs of step 4.
    `stale_s`: so long ago a sweep was killed that was about to drop step 4.
    """
    job = SmallJob()
    job.save_and_commit()
    for rows in ([0, 9], [0, 1, 9], [0, 1]):
        job.change(rows)
        job.save_and_commit()
        job.sweep(KEEP)
        job.advance(GRACE_S + HOUR_S)
    assert {save.step for save in job.listed} == {4}
    if stale_s is not None:
        step = max(job.listed)
        job.store.put(step.trash_key, record_of(Catalog(job.store), step).encode())
        job.advance(stale_s)
    before = {name: array.copy() for name, array in job.state.items()}
    job.change(range(16))
    whole = job.save()
    job.state = before
    job.change([2])
    save = job.save()
    job.commit(whole)
    assert {save.step for save in job.listed} == {4, 5}
    return job, save


def actors(job: SmallJob, save: Save) -> dict[str, Actor]:
    newer = GenerationId(99, "0" * 8)
    return {
        "gc": lambda store: sweep(Catalog(store), KEEP, None),
        "live": lambda store: sweep(Catalog(store), KEEP, job.generation),
        "commit": lambda store: Committer(Catalog(store)).commit_when_whole(save.id, save.world_size, lambda: 0.0),
        "finish": lambda store: finish_saves(Catalog(store), newer),
    }


def run(job: SmallJob, save: Save, first: str, second: str, at: int, killed: int | None = None) -> bool:
    """All of `second` before the operation `at` of `first`, which dies after so many; whether it got so far."""
    outer, inner = ActorStore(job.store, killed), ActorStore(job.store)
    manifests = {of: job.store.get(of.manifest_key) for of in job.listed}
    count, reached = 0, False

    def before(op: str, key: str) -> None:
        nonlocal count, reached
        if count == at and not reached:
            reached = True
            act(actors(job, save)[second], inner)
            note_committed(job)
            manifests.update({of: job.store.get(of.manifest_key) for of in job.found_listed()})
        count += 1

    outer.before = before
    act(actors(job, save)[first], outer)
    note_committed(job)
    job.note_dropped(manifests)
    return reached


def act(actor: Actor, store: Store) -> None:
    with suppress(CkptError, Crash):
        actor(store)


def note_committed(job: SmallJob) -> None:
    job.listed |= job.found_listed()


NAMES = ("gc", "live", "commit", "finish")
SAME = {("live", "gc"), ("commit", "commit"), ("finish", "finish")}
PAIRS = [(a, b) for a in NAMES for b in NAMES if (a, b) not in SAME]

CASES = [
    *((a, b, None) for a, b in PAIRS),
    *((a, b, stale_s) for a, b in PAIRS for stale_s in (60.0, 2 * HOUR_S) if {a, b} <= {"gc", "live"}),
]


@pytest.mark.parametrize(("first", "second", "stale_s"), CASES, ids=str)
def test_between_any_two_operations(first: str, second: str, stale_s: float | None) -> None:
    """Then a third sweep comes, which must still spare what readers of the dropped step need, and step 6."""
    ready, save = busy_job(stale_s)
    at, reached = 0, True
    while reached:
        job = copied(ready)
        reached = run(job, save, first, second, at)
        with told(f"{second} before operation {at} of {first}"):
            judge(job, save)
        at += 1
    assert at > 10


def test_a_committer_may_be_paused_just_before_its_manifest() -> None:
    """For the grace period less a save deadline: the record that kept its packs was no older than that."""
    job, save = busy_job()
    manifests = {of: job.store.get(of.manifest_key) for of in job.listed}
    job.sweep(KEEP)
    assert {of.step for of in job.listed} == {5}
    job.advance(DEADLINE_S - 60)

    def before(op: str, key: str) -> None:
        if (op, key) == ("put", save.id.manifest_key):
            job.advance(GRACE_S - DEADLINE_S)
            job.sweep(KEEP)
            job.sweep(KEEP)

    store = ActorStore(job.store)
    store.before = before
    act(actors(job, save)["commit"], store)
    note_committed(job)
    job.note_dropped(manifests)
    assert save.id in job.listed
    job.check()
    job.settle(KEEP)
    assert job.listed == {save.id}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), PAIRS, ids=str)
def test_killed_anywhere_with_another_between(first: str, second: str) -> None:
    """Without the record of a sweep that was killed long ago: three accidents at once may cost a reader its grace."""
    ready, save = busy_job()
    at, reached = 0, True
    while reached:
        for killed in range(at + 1, at + 30):
            job = copied(ready)
            reached = run(job, save, first, second, at, killed)
            with told(f"{second} before operation {at} of {first}, which is killed after {killed}"):
                judge(job, save)
        at += 1


@contextmanager
def told(what: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def judge(job: SmallJob, save: Save) -> None:
    job.check()
    for _ in range(2):
        job.sweep(KEEP)
        job.check()
    act(actors(job, save)["commit"], job.store)
    note_committed(job)
    assert save.id in job.listed
    job.check()
    act(actors(job, save)["finish"], job.store)
    assert not job.found_listed() & job.dropped.keys(), "a dropped step is back"
    for _ in range(2):
        job.advance(GRACE_S / 2)
        job.sweep(KEEP)
        job.check()
    job.settle(KEEP)
    assert job.listed == {save.id}
