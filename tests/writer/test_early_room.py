"""A full store is given room before the grace period is over: no save that is under way loses what it uses."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
from helpers.actors import ActorStore, Crash, no_chance
from helpers.small_job import DEADLINE_S, GRACE, Save, SmallJob, copied

from ckptlib.catalog.catalog import Catalog
from ckptlib.catalog.commit import Committer
from ckptlib.catalog.retention import sweep
from ckptlib.errors import SaveFailed, StoreFull
from ckptlib.format.keys import SaveId
from ckptlib.policy.keep import EARLY_S, Keep
from ckptlib.writer.channel import Channel
from ckptlib.writer.commits import Commits
from ckptlib.writer.failures import Failures
from ckptlib.writer.requests import Requests
from ckptlib.writer.trainer import Trainer
from ckptlib.writer.watchdog import Watchdog

KEEP = Keep(last=1, grace=GRACE)


@pytest.fixture(autouse=True)
def by_count() -> Iterator[None]:
    with no_chance():
        yield


def job_with_a_slow_save(num_failed: int = 0) -> tuple[SmallJob, Save]:
    """It uses packs of step 1, which was dropped when step 2 had been committed beside it. `num_failed`: saves that
    were begun between the two."""
    job = SmallJob()
    job.save_and_commit()
    before = {name: array.copy() for name, array in job.state.items()}
    job.change(range(16))
    job.change_small()
    whole = job.save()
    job.state = before
    job.change([2])
    for _ in range(num_failed):
        job.saves.remove(job.begin_save())
    slow = job.save()
    job.commit(whole)
    job.advance(EARLY_S)
    job.sweep(KEEP, live=True)
    assert {save.step for save in job.listed} == {2}
    return job, slow


def test_what_a_save_uses_that_is_under_way_stays() -> None:
    job, slow = job_with_a_slow_save()
    for _ in range(3):
        job.advance(EARLY_S)
        job.make_room(KEEP)
        job.check()
    job.commit(slow)
    assert job.listed == {slow.id, *job.listed}
    job.advance(EARLY_S + 1)
    job.make_room(KEEP)
    job.advance(EARLY_S + 1)
    job.make_room(KEEP)
    assert job.listed == {slow.id}
    assert not [key for key in job.keys("packs/") if "000000000002-" in key], "nobody needs these"
    job.check()


def commits_of(job: SmallJob, channel: Channel) -> Commits:
    """As the writer process of rank 0 has them."""
    trainer = Trainer(os.getpid())
    trainer.deadline_s = DEADLINE_S
    watchdog = Watchdog(Requests(), DEADLINE_S, lambda work, request: None, lambda work, request: None)
    catalog = Catalog(job.store)
    failures = Failures(channel, catalog.shared, 0, watchdog.slack_s, trainer)
    return Commits(channel, trainer, watchdog, failures, catalog, job.world_size, KEEP, None)


@pytest.mark.parametrize("is_known", [True, False])
def test_what_a_save_uses_stays_though_the_machine_slept(is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's clock went on, and the monotonic one stood still. `is_known`: else room is made, which proves that it
    would be."""
    job, slow = job_with_a_slow_save(num_failed=1)
    left, right = socket.socketpair()
    with left, right:
        commits = commits_of(job, Channel(right))
        if is_known:
            commits.expect(slow.id)
        wall = time.time
        monkeypatch.setattr(time, "time", lambda: wall() + 2 * EARLY_S)  # by which the store goes, too
        commits.forget(SaveId(slow.id.step - 1, job.generation), StoreFull("no room for the save before it"))
        commits.put(slow.id, time.monotonic())
        commits.finish()
        commits.finish_sweeps()
        told = [event["event"] for event in Channel(left).receive(0) if event.get("save") == str(slow.id)]
    assert told == (["committed"] if is_known else ["failed"])
    assert (slow.id in job.found_listed()) == is_known


def test_where_nobody_knows_that_a_save_is_under_way_it_is_refused() -> None:
    """As when the writer that commits was started again meanwhile. Killed anywhere, too: it never commits without."""
    ready, slow = job_with_a_slow_save()
    ready.advance(EARLY_S + 1)
    at, killed, outcomes = 0, True, set[bool]()
    while killed:
        job = copied(ready)
        store = ActorStore(job.store, at)
        with suppress(Crash):
            sweep(Catalog(store), KEEP, job.generation, early_s=EARLY_S)
            killed = False
        is_refused = False
        try:
            Committer(Catalog(job.store)).commit_when_whole(slow.id, slow.world_size, lambda: 0.0)
        except SaveFailed:
            is_refused = True
        outcomes.add(is_refused)
        assert is_refused == (slow.id not in job.found_listed()), at
        for save in job.found_listed():
            job.check_loads(save, job.store.get(save.manifest_key))
        at += 1
    assert outcomes == {False, True}
    assert is_refused


def test_a_restart_that_comes_late_commits_what_was_whole() -> None:
    """No other job has begun since, whose sweeps would not reckon with it. The step that was dropped is older than the
    last one, and this one newer."""
    job, slow = job_with_a_slow_save()
    job.advance(DEADLINE_S - EARLY_S)
    job.finish()
    assert slow.id in job.listed
    job.check()


def test_what_failed_saves_left_goes_too() -> None:
    """Of ranks that had room, where another one had none."""
    job = SmallJob()
    job.save_and_commit()
    for _ in range(3):
        job.change(range(16))
        job.persist(job.begin_save(), 0)
    job.saves.clear()  # they have failed
    for _ in range(2):
        job.advance(EARLY_S + 1)
        job.make_room(KEEP)
    assert {key.split("/")[1] for key in job.keys("packs/")} == {str(save) for save in job.listed}
    job.check()
